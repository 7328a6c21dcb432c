#!/bin/sh
# What check, simulate, compare and the help print: the same bytes twice, and numbers that agree.
. "$(dirname "$0")/lib.sh"

expect 0 '^moesim [0-9]' --version
expect 0 '^  trace info ' --help
expect 0 '^  trace info ' help
expect 0 '^  trace merge ' trace --help
[ "$(grep -c '^  ' out)" -eq 4 ] || fail "the commands of trace: $(cat out)"
for command in capture check simulate compare 'trace info' report; do
    # shellcheck disable=SC2086 # a command of two words
    expect 0 "^usage: moesim $command " $command --help
done
expect 0 '--timeout S .*(60)' capture --help

# ---- check ----
same check "$small"
same check --json -- "$small"
[ "$(value schema) $(value errors)" = 'moesim.check/1 0' ] || fail 'check --json'
expect 0 '^no errors: 4 ranks' check "$small"
[ "$(grep -c '^  C[1-6] ' out)" -eq 6 ] || fail 'check does not say what it proved'
cp "$small" "$(printf 'caf\351.yaml')"
expect 0 '"name": "caf?.yaml"' check "$(printf 'caf\351.yaml')" --json

# ---- simulate ----
same simulate "$small"
same simulate "$small" --json --topology pcie_box
[ "$(value schema) $(value topology)" = 'moesim.simulate/1 pcie_box' ] || fail 'simulate --json'
# The parts make the step (written with 12 digits), kernels the compute time, and operations moved the bytes.
awk -F'[:,]' '
    /^  "step_us"/ { step = $2 }
    /^  "(compute|exposed|waiting|host)_us"/ { parts += $2 }
    /^  "compute_us"/ { compute = $2 }
    /^  "intra_node_bytes"/ { links = $2 }
    /^ *"kind"/ { kernel = /kernel/ }
    /^ *"own_us"/ && kernel { own += $2 }
    /^ *"sent_bytes"/ { sent += $2 }
    function near(a, b) { return a - b < 1e-6 * a && b - a < 1e-6 * a }
    END { exit !(step > 0 && near(step, parts) && near(compute, own) && links == sent && sent > 0) }' out ||
    fail 'simulate --json: the sums differ'
step_us=$(value step_us)
expect 0 "^step  *$(printf %.1f "$step_us") us" simulate "$small" --topology pcie_box
awk '
    /^and [0-9]* shorter ones/ { said = 1; listed = 0 }
    listed { time = $(NF - 2) + $(NF - 1); if (n++ && time > last) bad = 1; last = time }
    / own_us / { listed = 1 }
    END { exit bad || n != 12 || !said }' out || fail 'simulate does not list the longest operations first'

# ---- compare ----
same compare "$small" --vary topology=pcie_box,dgx_h100 --vary dispatcher=alltoall
same compare "$small" --vary=topology=pcie_box,dgx_h100 --json
[ "$(value schema) $(value best)" = 'moesim.compare/4 1' ] || fail 'compare --json'
[ "$(value step_us)" = "$step_us" ] || fail "compare and simulate disagree: $(value step_us), $step_us"
expect 0 '^best: dgx_h100 with alltoall: ' compare "$small" --vary topology=pcie_box,dgx_h100
grep -q '^next: pcie_box with alltoall takes .* as long, .*; what decides is ' out || fail 'no reason'
! grep -q '^worst:' out || fail 'compare has a worst of two'
expect 0 '"best": 0' compare "$small" --vary topology=dgx_h100,dgx_h100 --json
expect 0 '^next: dgx_h100 with alltoall is as fast$' compare "$small" --vary topology=dgx_h100,dgx_h100
expect 0 '^best: dgx_h100' compare "$small" --vary dispatcher=alltoall
! grep -q '^next:' out || fail 'compare has a next of one'

# ---- a store of results: replaced, not added to ----
for run in 1 2; do
    expect 0 '^best: ' compare "$small" --vary topology=pcie_box,dgx_h100 -o results.db
    expect 0 '"results": 2,' trace info results.db --json
done
[ "$(value schema)" = moesim.trace.info/1 ] || fail 'trace info --json'
[ "$(echo results.db*)" = results.db ] || fail "after run $run files are left: $(echo results.db*)"
# At a terminal check says how far it is, and takes that back; elsewhere `expect` sees that it does not.
cases=$((cases + 1))
script -qec "\"$moesim\" check \"$demo\" 2>&1 > out" /dev/null < /dev/null > shown
tr '\r' '\n' < shown | sed -n 's/^checked \([0-9]*\) %$/\1/p' > percent
{ sort -nuc percent && [ "$(tail -n 1 percent)" = 100 ]; } || fail "progress: $(head -c 300 shown)"
grep -q '^no errors: ' out || fail "progress: $(head -c 300 out)"
[ "$(tail -c 16 shown | tr -d ' \r\n')" = '' ] || fail "progress stays: $(tail -c 40 shown)"
finish
