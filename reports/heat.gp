# heat.gp - the load of each expert in each layer, from NAME.csv to NAME.svg.
# call "heat.gp" NAME LAYERS EXPERTS TOP; TOP: where the colour scale ends, in multiples of the mean
name = ARG1
layers = ARG2 + 0
experts = ARG3 + 0
top = ARG4 + 0
reset
row = layers > 16 ? 480.0 / layers : layers > 8 ? 30 : 44
set terminal svg size 660, int(100 + layers * row) dynamic noenhanced name name font "DejaVu Sans,13"
set output name . ".svg"
set datafile separator comma
set border 0
set tics scale 0 textcolor rgb "#444444"
set xtics 0, experts > 32 ? int(experts / 16) : 1
set ytics 0, layers > 16 ? int(layers / 8) : 1
set xlabel "expert" textcolor rgb "#444444"
set ylabel "layer" textcolor rgb "#444444"
set xrange [-0.5:experts - 0.5]
set yrange [layers - 0.5:-0.5]
# Blue below the mean, white at it, orange above; black text stays readable on both ends.
set palette defined (0 "#6aa6d6", 1 "#ffffff", top "#f08a24")
set cbrange [0:top]
set cbtics 1
set colorbox user origin screen 0.92, graph 0 size screen 0.02, graph 1
set lmargin screen 0.09
set rmargin screen 0.90
labelled = layers <= 16 && experts <= 16
gap = labelled ? 0.48 : 0.5
plot name . ".csv" skip 1 using 3:2:(gap):(gap):5 with boxxyerror fs solid noborder lc palette notitle, \
     "" skip 1 using 3:2:(labelled ? sprintf("%.2f", $5) : "") with labels notitle
