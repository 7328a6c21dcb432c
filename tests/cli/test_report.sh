#!/bin/sh
# The report: its numbers and findings are those that SQL and awk find in the same store, its page stands by
# itself.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

sql() { sqlite3 -separator , run.db "$1"; }

sed 's/expert_parallel: 4/expert_parallel: 2/' "$small" > pairs.yaml
expect 0 . capture pairs.yaml --data "$source_dir/LICENSE" -o run.db --steps 4
# A rank with nothing to receive leaves before the other has come: it has no own time.
sql "UPDATE op SET end_ns = entry_ns, start_ns = entry_ns WHERE label = 'layer 0 forward dispatch'"
expect 0 '^best: ' compare run.db --vary topology=pcie_box,dgx_h100 -o run.db
expect 0 '^Routing: ' report run.db -o page
cp out findings

# ---- routing: four hexadecimal digits an expert, the low byte first ----
loads()
{
    echo step,layer,expert,tokens,relative
    sql "SELECT layer, hex(ids) FROM routing WHERE step = $1" | awk -F, -v step="$1" '
        function digit(i) { return index("0123456789ABCDEF", substr($2, i, 1)) - 1 }
        {
            for (i = 1; i < length($2); i += 4) {
                tokens[$1, 16 * digit(i) + digit(i + 1) + 256 * (16 * digit(i + 2) + digit(i + 3))]++
                all[$1]++
            }
        }
        END {
            for (l = 0; l < 2; l++)
                for (e = 0; e < 8; e++)
                    printf "%d,%d,%d,%d,%.6g\n", step, l, e, tokens[l, e], tokens[l, e] * 8 / all[l]
        }'
}
loads 0 > load_first.csv
loads 3 > load_last.csv
cmp load_first.csv page/load_first.csv && cmp load_last.csv page/load_last.csv || fail 'other loads'

# ---- the measured step: tokens move in pairs 0-1 and 2-3, which also sum the norm of the experts' gradients;
# experts are summed over 0-2 and 1-3, all else over all ranks ----
sql "
CREATE TEMP VIEW span AS SELECT step, rank, MAX(end_ns) - MIN(entry_ns) AS ns FROM op GROUP BY step, rank;
CREATE TEMP VIEW median AS
    SELECT step, MAX(ns) AS ns FROM span GROUP BY step ORDER BY 2, 1 LIMIT 1 OFFSET 1;
CREATE TEMP VIEW one AS SELECT op.* FROM op JOIN median USING (step);
CREATE TEMP VIEW met AS SELECT *, MIN(end_ns, MAX(entry_ns) OVER (PARTITION BY label,
        CASE WHEN label LIKE '% sum_w1' OR label LIKE '% sum_w2' THEN rank % 2
            WHEN label LIKE '% sum_%' AND label NOT LIKE '% sum_expert_norm' THEN 0 ELSE rank / 2 END))
        AS met_ns
    FROM one WHERE kind = 'collective';
CREATE TEMP VIEW part AS
    SELECT rank, CASE WHEN label LIKE '% forward %' THEN 1 WHEN label LIKE '% backward %' THEN 2 ELSE 3 END
        AS part, end_ns - entry_ns AS ns FROM one WHERE kind = 'kernel'
    UNION ALL SELECT rank, 4, end_ns - met_ns FROM met
    UNION ALL SELECT rank, 5, met_ns - entry_ns FROM met
    UNION ALL SELECT rank, 6, (SELECT ns FROM median) FROM rank
    UNION ALL SELECT rank, 6, -(end_ns - entry_ns) FROM one WHERE kind <> 'host_sync';
SELECT rank, part, (SELECT step FROM median), (SELECT ns FROM median), SUM(ns)
    FROM part GROUP BY rank, part" > parts
awk -F, '
    FNR == NR { us[$1, $2] = $5 / 1e3; us["mean", $2] += $5 / 1e3 / 4; step_us = $4 / 1e3; next }
    FNR == 1 { next }
    {
        name = $1 == "\"mean of ranks\"" ? "mean" : substr($1, 7, 1)
        if ($2 - step_us > 0.001 || step_us - $2 > 0.001) print "step " $2 ", expected " step_us
        for (p = 1; p <= 6; p++)
            if ($(2 + p) - us[name, p] > 0.001 || us[name, p] - $(2 + p) > 0.001)
                print $1 ", part " p ": " $(2 + p) ", expected " us[name, p]
        lines++
    }
    END { if (lines != 5) print lines " bars, expected 5" }' parts page/measured_us.csv > differences
[ ! -s differences ] || fail "measured: $(cat differences)"

# ---- simulated ----
sql "SELECT printf('\"%s\",%.3f,%.3f,%.3f,%.3f,%.3f,0.000,0,%.6g', topology, step_us, compute_us, exposed_us,
    waiting_us, host_us, step_us / MIN(step_us) OVER ()) FROM result ORDER BY step_us" > simulated
tail -n +2 page/simulated_us.csv | cmp - simulated || fail 'other results'

# ---- the findings, in words ----
sql "SELECT step, AVG(loss) FROM step WHERE step IN (0, 3) GROUP BY step" | awk -F, '
    function time(us, sign,    unit_us) {
        unit_us = us < 999.5 && us > -999.5 ? 1 : us < 999.5e3 && us > -999.5e3 ? 1e3 : 1e6
        return sprintf((sign ? "%+" : "%") ".3g %s", us / unit_us,
            unit_us == 1 ? "us" : unit_us == 1e3 ? "ms" : "s")
    }
    FILENAME == "load_first.csv" && FNR > 1 && $5 > first { first = $5 }
    FILENAME == "load_last.csv" && FNR > 1 && $5 > load[$2] { load[$2] = $5; top[$2] = $3 }
    FILENAME == "parts" { step_us = $4 / 1e3; part_us[$2] += $5 / 1e3 / 4 }
    FILENAME == "simulated" { n++; for (i = 1; i <= 6; i++) r[n, i] = $i; gsub(/"/, "", r[n, 1]) }
    FILENAME == "page/dropped.csv" { dropped[$1] = $3 }
    FILENAME == "-" { loss[$1] = $2 }
    END {
        l = load[1] > load[0]
        printf "Routing: in step 3, expert %d of layer %d gets %.2f times the mean load ", top[l], l, load[l]
        printf "(max/mean by layer: %.2f, %.2f); in step 0 the highest was %.2f times. ", load[0], load[1],
            first
        printf "A capacity factor of 1 would drop %.1f %% of its rows, one of 1.25 %.1f %%.\n",
            dropped["1.000"], dropped["1.250"]
        for (i = 3; i <= 6; i++) {
            if (i == 3 || r[2, i] - r[1, i] > more) { more = r[2, i] - r[1, i]; why = i }
            if (i == 3 || r[1, i] > most) { most = r[1, i]; of_it = i }
        }
        split("compute,exposed collectives,waiting for others,host and idle", term, ",")
        printf "Simulated: %s is the best of 2: %s a step, most of it %s (%.0f %%); ", r[1, 1], time(r[1, 2]),
            term[of_it - 2], 100 * most / r[1, 2]
        printf "%s, the next, needs %s, %.2f times as long; what decides is %s (%s, all else %s).\n", r[2, 1],
            time(r[2, 2]), r[2, 2] / r[1, 2], term[why - 2], time(more, 1), time(r[2, 2] - r[1, 2] - more, 1)
        printf "Measured: a step takes %s here (median of 4), of which collectives are %.0f %% and waiting ",
            time(step_us), 100 * part_us[4] / step_us
        printf "for others %.0f %%; the loss went from %.3f to %.3f nats a byte.\n",
            100 * part_us[5] / step_us, loss[0], loss[3]
    }' load_first.csv load_last.csv parts simulated page/dropped.csv - > expected
diff expected findings || fail 'other findings'
sed -n 's/^<li>\(.*\)<\/li>$/\1/p' page/index.html | cmp - findings || fail 'the page has other findings'

# ---- the page needs nothing else ----
[ "$(grep -c '^<svg' page/index.html)" -eq 6 ] || fail 'not six figures'
sed 's/ xmlns[:a-z]*="[^"]*"//' page/index.html |
    grep -nE 'https?:|href|src=|url\(|@import|<script|<link|@[a-z_]+@' && fail 'the page needs another file'
files='.??*'
for name in dropped index load_first load_last measured_us simulated_us traffic; do
    [ $name = index ] && files="$files index.html" || files="$files $name.csv $name.png"
done
[ "$(cd page && echo .??* *)" = "$files" ] || fail "other files: $(ls -A page)"

# ---- other data, other findings; without results, one figure less ----
expect 0 . capture pairs.yaml --data "$source_dir/sim/check/check.c" -o other.db --steps 2
expect 0 '^Routing: ' report other.db -o other
grep -qxF "$(head -n 1 findings)" out && fail 'the same finding for other data'
[ "$(wc -l < out)" -eq 2 ] && [ "$(grep -c '^<svg' other/index.html)" -eq 5 ] &&
    grep -q 'Nothing simulated' other/index.html || fail 'a report without results'

# ---- what cannot be reported leaves the old page as it was ----
cp page/index.html before.html
broken() # PATTERN SQL
{
    cp run.db broken.db
    sqlite3 broken.db "$2"
    expect 3 "$1" report broken.db -o page
}
broken 'broken.db: no step that every rank completed' 'DELETE FROM step WHERE rank = 1'
broken 'broken.db: the run has no scenario' "DELETE FROM run WHERE key = 'scenario'"
broken 'broken.db: step 3 of the trace has no routing for layer 1, rank 2' \
    'DELETE FROM routing WHERE step = 3 AND layer = 1 AND rank = 2'
broken "broken.db: step 0 of the trace, layer 0, rank 0: expert 255 of 8" \
    "UPDATE routing SET n_tokens = 1, ids = x'ff000100' WHERE step = 0"
broken "broken.db: 'head backward .*' of rank 3 is not in the schedule" \
    "UPDATE op SET block = 99 WHERE rank = 3 AND label LIKE 'head backward%'"
broken 'broken.db: no operation was recorded' 'DELETE FROM op'
broken "broken.db: 5 ranks, 2 layers, 8 experts recorded, the scenario has 4, 2, 8" "
    UPDATE run SET value = 5 WHERE key = 'ranks';
    INSERT INTO step SELECT step, 4, wall_ns, loss FROM step WHERE rank = 0"
: > file
expect 1 'file: Not a directory' report run.db -o file
mkdir bin
printf '#!/bin/sh\nexit 1\n' > bin/gnuplot
chmod +x bin/gnuplot
PATH=$work/bin:$PATH
expect 1 'gnuplot' report run.db -o page
cmp before.html page/index.html && [ "$(cd page && echo .??* *)" = "$files" ] ||
    fail 'a failed report changed the page'
finish
