# bars.gp - times as stacked bars, from NAME.csv (bar, step, parts; in us) to NAME.svg.
# call "bars.gp" NAME BARS PARTS UNIT_US UNIT RANKED; only the first BARS lines are drawn; RANKED: the last
# part is dropped rows
name = ARG1
bars = ARG2 + 0
parts = ARG3 + 0
unit_us = ARG4 + 0
unit = ARG5
ranked = ARG6 + 0
reset
height = 110 + bars * 34
set terminal svg size 660, height dynamic noenhanced name name font "DejaVu Sans,13"
set output name . ".svg"
set datafile separator comma
set border 1 linecolor rgb "#888888"
set tics scale 0.5 nomirror textcolor rgb "#444444"
set grid xtics linecolor rgb "#e4e4e4" linetype 1
set xlabel "time of a step, " . unit textcolor rgb "#444444"
set key at screen 0.5, screen 0.99 top center horizontal maxcols 3 reverse Left samplen 1 width -3 \
        textcolor rgb "#222222"
set tmargin at screen 1 - 52.0 / height
# Okabe and Ito's colours. The last three parts are the same in every figure: collectives, waiting, the rest.
colour(part) = word("#d55e00 #c4c4c4 #cc79a7 #e69f00 #0072b2 #56b4e9 #009e73", parts - part + !ranked)
low(part) = sum [c = 3 : 2 + part] column(c) / unit_us
stats name . ".csv" skip 1 using (low(parts)) every ::::bars - 1 nooutput
# About four tics, a round number apart.
digit = 10 ** floor(log10(STATS_max / 4))
first = STATS_max / 4 / digit
set xtics digit * (first < 1.5 ? 1 : first < 3.5 ? 2 : first < 7.5 ? 5 : 10)
set xrange [0:STATS_max * 1.12]
set yrange [bars - 0.5:-0.5]
plot for [p = 0 : parts - 1] name . ".csv" every ::::bars - 1 \
       using (0):0:(low(p)):(low(p + 1)):($0 - 0.36):($0 + 0.36):ytic(1) \
       with boxxyerror fs solid noborder lc rgb colour(p) title columnheader(3 + p), \
     name . ".csv" skip 1 every ::::bars - 1 using (low(parts)):0:(sprintf("%.3g", low(parts))) \
       with labels left offset 0.5, 0 textcolor rgb "#222222" notitle
