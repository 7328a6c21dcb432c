# heat.gp - a matrix of numbers around their mean, from NAME.csv to NAME.svg. Columns 2 to 5 of the CSV: row,
# column, number, number / mean.
# call "heat.gp" NAME ROWS COLUMNS TOP YLABEL XLABEL LABEL; TOP: where the colour scale ends, in multiples
# of the mean; LABEL: what cells say where there is room, "relative" or the number itself
name = ARG1
rows = ARG2 + 0
columns = ARG3 + 0
top = ARG4 + 0.0
relative = ARG7 eq "relative"
reset
height = int(100 + rows * (rows > 16 ? 480.0 / rows : rows > 8 ? 30 : 44))
set terminal svg size 660, height dynamic noenhanced name name font "DejaVu Sans,13"
set output name . ".svg"
set datafile separator comma
set border 0
set tics scale 0 textcolor rgb "#444444"
set xtics 0, columns > 32 ? int(columns / 16) : 1
set ytics 0, rows > 16 ? int(rows / 8) : 1
set xlabel ARG6 textcolor rgb "#444444"
set ylabel ARG5 textcolor rgb "#444444"
set xrange [-0.5:columns - 0.5]
set yrange [rows - 0.5:-0.5]
# Blue below the mean, white at it, orange above; black text stays readable on both ends.
set palette defined (0 "#6aa6d6", 1 "#ffffff", top "#f08a24")
set cbrange [0:top]
set cbtics ceil(top / 8)
set colorbox user origin screen 0.92, graph 0 size screen 0.02, graph 1
set lmargin screen 0.09
set rmargin screen 0.90
labelled = rows <= 16 && columns <= (relative ? 16 : 8)
gap = labelled ? 0.48 : 0.5
cell(number, ratio) = !labelled ? "" : relative ? sprintf("%.2f", ratio) : sprintf("%d", number)
plot name . ".csv" skip 1 using 3:2:(gap):(gap):5 with boxxyerror fs solid noborder lc palette notitle, \
     "" skip 1 using 3:2:(cell($4, $5)) with labels notitle
