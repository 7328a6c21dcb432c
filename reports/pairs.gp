# pairs.gp - measured and predicted times as pairs of bars, from NAME.csv (name, measured, predicted, error;
# us and per cent; the first line is the sum and not drawn) to NAME.svg.
# call "pairs.gp" NAME PAIRS UNIT_US UNIT; only the first PAIRS lines are drawn
name = ARG1
pairs = ARG2 + 0
unit_us = ARG3 + 0
unit = ARG4
reset
height = 110 + pairs * 44
set terminal svg size 660, height dynamic noenhanced name name font "DejaVu Sans,13"
set output name . ".svg"
set datafile separator comma
set border 1 linecolor rgb "#888888"
set tics scale 0.5 nomirror textcolor rgb "#444444"
set grid xtics linecolor rgb "#e4e4e4" linetype 1
set xlabel "time in a step, " . unit textcolor rgb "#444444"
set key at screen 0.5, screen 0.99 top center horizontal reverse Left samplen 1 textcolor rgb "#222222"
set tmargin at screen 1 - 36.0 / height
text(us, error) = sprintf("%.3g (%+.0f %%)", us / unit_us, error)
longest(a, b) = (a > b ? a : b) / unit_us
stats name . ".csv" skip 2 every ::::pairs - 1 using (longest($2, $3)) nooutput
set xrange [0:STATS_max * 1.35]
set yrange [pairs - 0.5:-0.5]
plot for [i = 0 : 1] name . ".csv" skip 2 every ::::pairs - 1 \
       using (0):0:(0):(column(2 + i) / unit_us):($0 - 0.36 * (1 - i)):($0 + 0.36 * i):ytic(1) \
       with boxxyerror fs solid noborder lc rgb word("#0072b2 #e69f00", 1 + i) \
       title word("measured predicted", 1 + i), \
     "" skip 2 every ::::pairs - 1 using ($2 / unit_us):($0 - 0.18):(sprintf("%.3g", $2 / unit_us)) \
       with labels left offset 0.5, 0 textcolor rgb "#222222" notitle, \
     "" skip 2 every ::::pairs - 1 using ($3 / unit_us):($0 + 0.18):(text($3, $4)) \
       with labels left offset 0.5, 0 textcolor rgb "#222222" notitle
