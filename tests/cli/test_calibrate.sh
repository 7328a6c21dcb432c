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
expect 0 . simulate two.yaml --topology named.yaml
grep -q '^name: my_host$' named.yaml && grep -q '^  cores: 3$' named.yaml || fail "$(cat named.yaml)"

# The table has the lines and the numbers of the results.
expect 0 '^step: .* % off; phases of 5 %' validate run.db --topology host.yaml -o phases.csv
expect 0 '"schema": "moesim.validate/1"' validate run.db --topology host.yaml --json
[ "$(grep -c '"phase"' out)" -eq "$(($(wc -l < phases.csv) - 1))" ] || fail "lines: $(cat phases.csv)"
[ "$(grep '^"step",' phases.csv | cut -d, -f3 | cut -d. -f1)" = \
    "$(sed -n '/"phase": "step"/,/error/s/.*"predicted_us": \([0-9]*\).*/\1/p' out)" ] || fail 'another step'

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

expect 2 'output TOPOLOGY.yaml is required' calibrate run.db
expect 2 'topology T is required' validate run.db
expect 2 'name a b: expected up to 47 letters' calibrate run.db -o host.yaml --name 'a b'
expect 3 'two.yaml: ' calibrate two.yaml -o host.yaml
expect 3 "unknown topology 'nowhere'" validate run.db --topology nowhere
expect 1 'no/host.yaml: No such file' calibrate run.db -o no/host.yaml
expect 0 . capture two.yaml --data "$small" -o short.db --steps 4
expect 3 'short.db: 4 steps with all .* operations, expected 5 or more' calibrate short.db -o host.yaml
# A trace of another program: one operation has another label, or is missing in all steps.
cp run.db other.db
sqlite3 other.db "UPDATE op SET label = 'layer 0 forward other' WHERE op = 1 AND block = 1"
expect 3 "other.db: step .*'layer 0 forward other' is not what this" validate other.db --topology host.yaml
cp run.db less.db && sqlite3 less.db 'DELETE FROM op WHERE op = 1 AND block = 1'
expect 3 'less.db: 0 steps with all ' validate less.db --topology host.yaml
finish
