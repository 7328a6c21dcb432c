# lines.gp - shares in per cent by capacity factor, from NAME.csv (factor, then a line a column) to NAME.svg.
# call "lines.gp" NAME; no points: the page leaves gnuplot's symbols out
name = ARG1
reset
height = 320
set terminal svg size 660, height dynamic noenhanced name name font "DejaVu Sans,13"
set output name . ".svg"
set datafile separator comma
set border 3 linecolor rgb "#888888"
set tics scale 0.5 nomirror textcolor rgb "#444444"
set grid linecolor rgb "#e4e4e4" linetype 1
set xlabel "capacity factor" textcolor rgb "#444444"
set ylabel "rows dropped, %" textcolor rgb "#444444"
set key top right Left reverse samplen 2 textcolor rgb "#222222"
set xrange [0.5:3]
set yrange [0:*]
plot for [i = 2 : 4] name . ".csv" using 1:i with lines lw 2 \
         lc rgb word("#56b4e9 #0072b2 #e69f00", i - 1) title columnheader(i)
