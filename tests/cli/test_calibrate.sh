#!/bin/sh
# moesim calibrate and validate: their files, words, thresholds and errors. How near predictions come is
# measured by tests/bench/validate.sh, on a quiet machine.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

sed 's/ranks: 4, expert_parallel: 4/ranks: 2/' "$small" > two.yaml
expect 0 . capture two.yaml --data "$small" -o run.db --steps 12
expect 0 '^host.yaml: 10 numbers fitted to ' calibrate run.db -o host.yaml --cores 2
# Where each rank has a core, nothing says how long the ranks of one core take turns.
[ "$(grep -c '^    slice: not determined by this capture' host.yaml)" -eq 1 ] || fail "$(cat host.yaml)"
cp host.yaml first.yaml
same calibrate run.db -o host.yaml --cores 2 --json
cmp -s first.yaml host.yaml || fail 'another topology the second time'
expect 0 '; 3 cores$' calibrate run.db -o named.yaml --cores 3 --name my_host
# A sample is a kernel of a rank or a collective, not each of its times; those that took no time are left out.
samples=$(sed -n 's/.* fitted to \([0-9]*\) samples, medians of 5 steps of 12; .*/\1/p' out)
most=$(sqlite3 run.db "SELECT COUNT(*) FROM op WHERE step = 0 AND
    (kind = 'kernel' OR kind = 'collective' AND rank = 0)")
[ "$samples" -le "$most" ] && [ "$samples" -ge $((most * 9 / 10)) ] || fail "$most: $(head -n 1 out)"
expect 0 . simulate two.yaml --topology named.yaml
grep -q '^name: my_host$' named.yaml && grep -q '^  cores: 3$' named.yaml || fail "$(cat named.yaml)"

# The table has the lines and the numbers of the results.
expect 0 '^step: .* % off; phases of 5 %' validate run.db --topology host.yaml -o phases.csv
expect 0 '"schema": "moesim.validate/1"' validate run.db --topology host.yaml --json
[ "$(grep -c '"phase"' out)" -eq "$(($(wc -l < phases.csv) - 1))" ] || fail "lines: $(cat phases.csv)"
[ "$(grep '^"step",' phases.csv | cut -d, -f3 | cut -d. -f1)" = \
    "$(sed -n '/"phase": "step"/,/error/s/.*"predicted_us": \([0-9]*\).*/\1/p' out)" ] || fail 'another step'

# These steps were fitted, and those of another capture were not, though all that was asked is the same. The
# median of all steps is what SQL says.
grep -q '"fitted": true' out && head -n 1 phases.csv | grep -q ',fitted_us$' || fail "$(head -n 1 phases.csv)"
all_us=$(sqlite3 run.db "SELECT AVG(ns) / 1e3 FROM (SELECT MAX(end_ns) - MIN(entry_ns) AS ns FROM op
    GROUP BY step ORDER BY ns LIMIT 2 OFFSET 5)")
awk -F, -v sql="$all_us" -v all_us="$(value step_all_us)" -v pct="$(value step_all_error_pct)" '
    function near(a, b) { return a - b < 0.001 && b - a < 0.001 }
    /^"step"/ { e = 100 * ($3 / sql - 1); good = near(all_us, sql) && near(pct, e < 0 ? -e : e) }
    END { exit !good }' phases.csv || fail "median of all steps: SQL $all_us: $(grep step_all out)"
expect 0 '^these steps were fitted' validate run.db --topology host.yaml
expect 0 . capture two.yaml --data "$small" -o again.db --steps 12
expect 0 '"fitted": false' validate again.db --topology host.yaml -o again.csv --json
head -n 1 again.csv | grep -q ',predicted_us$' || fail "$(head -n 1 again.csv)"
expect 0 '^all steps: their median is ' validate again.db --topology host.yaml
grep -q fitted out && fail "$(tail -n 2 out)"
expect 0 '"fitted": true' validate run.db --topology host.yaml --json

# The worst phase is the largest error among those that count.
worst=$(awk '/"error_pct"/ {e = $2 < 0 ? -$2 : +$2} /"counts": true/ {if (e > m) m = e}
    END {printf "%.6f", m}' RS=',' FS=': ' out)
grep -q "\"worst_phase_error_pct\": ${worst%.*}\." out || fail "worst $worst: $(grep worst out)"

# A machine that is far too quick fails both thresholds; without them it does not.
sed 's/: [0-9.]* GFLOP/: 1e6 GFLOP/; s/memory: [0-9.]*/memory: 1e6/' host.yaml > quick.yaml
expect 0 . validate run.db --topology quick.yaml
for limit in step phase; do
    "$moesim" validate run.db --topology quick.yaml --max-$limit-error 1 > out
    [ $? -eq 5 ] && grep -q '^failed: ' out || fail "--max-$limit-error: $(tail -n 2 out)"
    expect 0 '"passed": true' validate run.db --topology quick.yaml --max-$limit-error 1000 --json
done

# A phase counts that was predicted and not measured.
cp run.db other.db
sqlite3 other.db "UPDATE op SET end_ns = start_ns WHERE label LIKE '% forward attention'"
sed 's/scalar: [0-9.]*/scalar: 0.001/' host.yaml > slow.yaml
expect 0 'worst infinitely far off (attention, forward)' validate other.db --topology slow.yaml
"$moesim" validate other.db --topology slow.yaml --max-phase-error 1000000 --json > out
[ $? -eq 5 ] && grep -q '"worst_phase_error_pct": null' out && grep -A 3 '"attention, forward"' out |
    grep -q '"error_pct": null' || fail "$(cat out)"

# Files are whole or as they were, and no trace, nor what is read.
cp run.db before.db
ln host.yaml link.yaml
expect 2 'o run.db: is what is read' calibrate run.db -o run.db
expect 2 'o other.db: is a trace store' calibrate run.db -o other.db
expect 2 'o run.db: is what is read' validate run.db --topology host.yaml -o run.db
expect 2 'o link.yaml: is what is read' validate run.db --topology ./host.yaml -o link.yaml
cmp -s run.db before.db && cmp -s host.yaml first.yaml || fail 'a file was replaced'
full=$({ trap '' XFSZ && ulimit -f 0 && "$moesim" calibrate run.db -o host.yaml --cores 2; } 2>&1)
case $full in *'calibrate: host.yaml: not written: '*) ;; *) fail "full: $full" ;; esac
cmp -s host.yaml first.yaml && [ ! -e host.yaml.partial ] || fail "not as it was: $(ls)"
: > held.yaml.partial
expect 1 'held.yaml.partial: File exists' calibrate run.db -o held.yaml
ln -s behind.yaml link
expect 0 . calibrate run.db -o link --cores 2
[ -L link ] && cmp -s behind.yaml first.yaml || fail "a link: $(ls -l)"

expect 2 'output TOPOLOGY.yaml is required' calibrate run.db
expect 2 'topology T is required' validate run.db
for name in 'a b' - ''; do
    expect 2 "name $name: expected up to 47 letters" calibrate run.db -o host.yaml --name "$name"
done
for cores in 1025 4294967296; do
    expect 2 "cores $cores: expected 1 to 1024" calibrate run.db -o host.yaml --cores $cores
done
expect 3 'two.yaml: ' calibrate two.yaml -o host.yaml
expect 3 "unknown topology 'nowhere'" validate run.db --topology nowhere
expect 1 'no/host.yaml: No such file' calibrate run.db -o no/host.yaml
expect 0 . capture two.yaml --data "$small" -o short.db --steps 4
expect 3 'short.db: 4 steps with all .* operations, expected 5 or more' calibrate short.db -o host.yaml
# A trace of another program: one operation has another label, or is missing in all steps.
cp run.db other.db
sqlite3 other.db "UPDATE op SET label = 'layer 0 forward other' WHERE op = 1 AND block = 1"
expect 3 "other.db: step .*'layer 0 forward other' is not what this" validate other.db --topology host.yaml
cp run.db over.db && sqlite3 over.db 'UPDATE op SET end_ns = end_ns + 1000000000'
expect 3 'over.db: launch -.* one after another' calibrate over.db -o host.yaml
cp run.db none.db && sqlite3 none.db 'UPDATE op SET entry_ns = 1, start_ns = 1, end_ns = 1'
expect 3 'none.db: step .* took no time' calibrate none.db -o host.yaml
expect 3 'none.db: step .* took no time' validate none.db --topology host.yaml --json
cp run.db less.db && sqlite3 less.db 'DELETE FROM op WHERE op = 1 AND block = 1'
expect 3 'less.db: 0 steps with all ' validate less.db --topology host.yaml
finish
