#!/bin/sh
# The figures of traffic, drops and predictions in the report, and its ranking: the same numbers as awk and
# SQL find in the store; of each figure a CSV and a PNG, and nothing else.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

sql() { sqlite3 -separator , run.db "$1"; }

# Ranks 0 and 2 split the experts, and 1 and 3. 16 tokens to 2 of 8 experts: a factor of 1 keeps 4 rows.
sed 's/parallel: 4/parallel: 2, rank_order: strided/; s/rank: 32/rank: 16/' "$small" > strided.yaml
expect 0 . capture strided.yaml --data "$source_dir/LICENSE" -o run.db --steps 12
expect 0 '^best: ' compare run.db --vary topology=pcie_box,dgx_h100 --vary dispatcher=alltoall,allgather \
    --vary capacity=dropless,1.0,1.25,2 -o run.db
expect 0 '^Simulated: ' report run.db -o page
cp out findings

# ---- choices: layer, rank, expert, a line each; two hexadecimal digits, the low byte first ----
choices()
{
    sql "SELECT layer, rank, hex(ids) FROM routing WHERE step = $1" | awk -F, '
        function digit(i) { return index("0123456789ABCDEF", substr($3, i, 1)) - 1 }
        { for (i = 1; i < length($3); i += 4) print $1 "," $2 "," 16 * digit(i) + digit(i + 1) }'
}
choices 0 > first
choices 11 > last

# 4 of the 8 experts a rank; a row is 16 floats.
awk -F, '
    { rows[$2, $2 % 2 + 2 * int($3 / 4)]++; all[$2]++ }
    END {
        print "step,from rank,to rank,rows,relative,bytes"
        for (f = 0; f < 4; f++)
            for (t = 0; t < 4; t++)
                printf "11,%d,%d,%d,%.6g,%d\n", f, t, rows[f, t], rows[f, t] * 2 / all[f], rows[f, t] * 64
    }' last > traffic.csv
diff traffic.csv page/traffic.csv || fail 'other traffic'

awk -F, '
    { rows[FILENAME, $1, $2, $3]++ }
    function dropped(file, layer, factor,    kept, r, e, n) {
        kept = int(4 * factor)
        if (kept < 4 * factor) kept++
        for (r = 0; r < 4; r++)
            for (e = 0; e < 8; e++)
                if (rows[file, layer, r, e] > kept) n += rows[file, layer, r, e] - kept
        return n / 128 * 100
    }
    END {
        print "capacity,step 0 (first),step 11 (last),its worst layer"
        for (factor = 0.5; factor <= 3; factor += 0.125) {
            a = dropped("last", 0, factor)
            b = dropped("last", 1, factor)
            printf "%.3f,%.4f,%.4f,%.4f\n", factor,
                (dropped("first", 0, factor) + dropped("first", 1, factor)) / 2, (a + b) / 2, (a > b ? a : b)
        }
    }' first last > dropped.csv
diff dropped.csv page/dropped.csv || fail 'other drops'
awk -F, '
    $1 == "1.000" { one = $3 }
    $1 == "1.250" {
        printf "A capacity factor of 1 would drop %.1f %% of its rows, one of 1.25 %.1f %%.", one, $3
    }
    ' dropped.csv > sentence
grep -qF "$(cat sentence)" findings || fail "no '$(cat sentence)': $(cat findings)"

# ---- the ranking: by time per kept token, names of what varies; drops are as in the figure ----
sql "
SELECT printf('\"%s, %s, %s\",%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.9g,%.6g', topology, dispatcher,
    CASE WHEN capacity > 0 THEN printf('capacity %g', capacity) ELSE 'dropless' END, step_us, compute_us,
    exposed_us, waiting_us, host_us, kept_us - step_us, dropped_share, kept_us / MIN(kept_us) OVER ())
FROM (SELECT *, step_us / (1 - dropped_share) AS kept_us FROM result) ORDER BY kept_us, id" > ranking
tail -n +2 page/simulated_us.csv | diff ranking - || fail 'another ranking'
[ "$(wc -l < ranking)" -eq 16 ] || fail 'not 16 results'
awk -F, 'NR == FNR { drop[$1 + 0] = $3; next }
    match($3, /capacity [0-9.]+/) {
        factor = substr($3, 11) + 0
        if ($10 * 100 - drop[factor] > 1e-3 || drop[factor] - $10 * 100 > 1e-3)
            print factor, $10, drop[factor]
    }' dropped.csv ranking > differences
[ ! -s differences ] || fail "compare drops others: $(cat differences)"
best=$(head -n 1 ranking | cut -d '"' -f 2)
grep -q "^Simulated: $best is the best of 16: " findings || fail "$best is not the best: $(cat findings)"
[ "$(grep -c '[0-9] times as long' page/index.html)" -eq 12 ] &&
    grep -q '4 more in the CSV' page/index.html ||
    fail 'not 12 rows of the ranking, 11 of them slower, beside the finding'

# ---- predicted against measured: the numbers of validate, and those of awk ----
expect 0 . validate run.db --topology pcie_box -o phases.csv
expect 0 '^Validated: ' report run.db --validate phases.csv -o page
grep '^Validated' out > sentence
tail -n +2 phases.csv | sort > phases
tail -n +2 page/predicted_us.csv | sed 's/,[^,]*,[^,]*$//' | sort | diff phases - || fail 'other phases'
sed 's/^"\(.*\)",\([^,]*\),/\1;\2;/' phases | awk -F';' '
    function abs(x) { return x < 0 ? -x : x }
    $1 == "step" { step = $2; of_step = ($3 / $2 - 1) * 100 }
    { name[NR] = $1; us[NR] = $2; predicted[NR] = $3; error[NR] = $2 > 0 ? ($3 / $2 - 1) * 100 : 0 }
    END {
        for (i = 1; i <= NR; i++) {
            if (name[i] == "step" || (us[i] < 0.05 * step && predicted[i] < 0.05 * step)) continue
            for (j = n++; j > 0 && sorted[j - 1] > abs(error[i]); j--) sorted[j] = sorted[j - 1]
            sorted[j] = abs(error[i])
            if (!worst || abs(error[i]) > abs(error[worst])) worst = i
        }
        printf "Validated: of the %d phases of 5 %% of the step or more ", n
        printf "the median prediction is %.1f %% off, ", (sorted[int((n - 1) / 2)] + sorted[int(n / 2)]) / 2
        printf "the furthest (%s) %+.1f %%; the step %+.1f %%.\n", name[worst], error[worst], of_step
    }' | diff - sentence || fail 'another sentence'
# Short phases that take long, predicted: none measured, of steps that were fitted.
sed 's/,predicted_us/,fitted_us/; s/^"\(routing, forward\)",.*/"\1",0.000,1e9/' phases.csv > fitted.csv
expect 0 '^Fitted, not predicted: .* the furthest (routing, forward) was not measured at all' \
    report run.db --validate fitted.csv -o page
for broken in 's/,measured_us//' 's/^"step",/"stop",/' 's/^"step",[^,]*/"step",nan/' '$s/$/,1/'; do
    sed "$broken" phases.csv > broken.csv
    expect 3 'broken.csv: expected a table of moesim validate' report run.db --validate broken.csv -o page
done
expect 1 'none.csv: No such file' report run.db --validate none.csv -o page

# ---- files: a PNG that is one for each CSV; a figure without data leaves no older one behind ----
for figure in load_first load_last traffic dropped measured_us simulated_us predicted_us; do
    [ -s "page/$figure.csv" ] && head -c 8 "page/$figure.png" | grep -q PNG || fail "$figure: no CSV or PNG"
done
[ "$(ls -A page | wc -l)" -eq 15 ] || fail "other files: $(ls -A page)"
sql 'DELETE FROM result'
expect 0 . report run.db -o page
[ "$(ls -A page | wc -l)" -eq 11 ] && grep -q 'Not validated: ' page/index.html ||
    fail "a figure of an older report: $(ls -A page)"
finish
