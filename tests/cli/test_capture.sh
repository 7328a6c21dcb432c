#!/bin/sh
# Real captures through the command: with 1 rank, under mpirun, interrupted, failing, without their programs.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

capture_one() { expect 0 '^steps_complete  *2$' capture one.yaml --data "$small" -o "$1" --steps 2; }
sed 's/ranks: 4, expert_parallel: 4/ranks: 1/' "$small" > one.yaml
sed 's/ranks: 4, expert_parallel: 4/ranks: 2/' "$small" > two.yaml

capture_one one.db
[ "$(echo one.db*)" = one.db ] || fail "files are left: $(echo one.db*)"
expect 0 '"steps_asked": 2,' trace info one.db --json
grep -q '^  "seed": 1,$' out || fail "the seed is no number: $(cat out)"
[ "$(value complete)" = true ] || fail 'the capture is not complete'
expect 0 '^no errors: 1 rank, .*routing of step 1$' check one.db
expect 0 'routing of step 0$' check one.db --step 0
expect 3 'no complete step 2, expected 0 to 1' check one.db --step 2
expect 0 '"step": 1$' simulate one.db --json

expect 0 '"schema": "moesim.capture/1"' capture -n2 two.yaml --data "$small" -o two.db --steps 2 --json
expect 0 '^best: ' compare two.db --vary topology=dgx_h100,pcie_box -o two.db
expect 0 '^results  *2$' trace info two.db
expect 0 . report two.db -o page
[ -s page/index.html ] || fail 'no page'

# A token once to each rank: the trace's routing says where; predictions send what was sent.
sed 's/^dispatcher: .*//; $a dispatcher: deepep' two.yaml > once.yaml
expect 0 '"schema": "moesim.capture/1"' capture once.yaml --data "$small" -o once.db --steps 2 --json
expect 0 '^no errors: 2 ranks' check once.db
expect 0 . simulate once.db --topology dgx_h100 --json
rows='forward dispatch_tokens'
sent=$(sed -n "/\"layer $rows\"/,/}/s/^ *\"sent_bytes\": \([0-9]*\).*/\1/p" out)
all=$(sqlite3 once.db "SELECT sum(bytes) FROM op WHERE step = 1 AND label LIKE '% $rows'")
[ "$sent" -gt 0 ] && [ "$all" -gt "$sent" ] || fail "predicted $sent bytes, sent $all with what stays"

# Saved after 4 steps and gone on with: the last step is that of 8 in one go.
expect 0 . capture two.yaml --data "$small" -o first.db --steps 4 --save half
expect 0 . capture two.yaml --data "$small" -o second.db --steps 4 --load half
expect 0 '"complete": true' trace info second.db --json
[ "$(value first_step) $(value last_step)" = '4 7' ] || fail "other steps: $(cat out)"
loss=$(value last_loss_nats)
expect 0 . capture two.yaml --data "$small" -o whole.db --steps 8 --json
[ "$(value last_loss_nats)" = "$loss" ] || fail "loss $loss after going on, $(value last_loss_nats) in one go"
expect 0 'routing of step 7$' check second.db
expect 3 'no complete step 3, expected 4 to 7' simulate second.db --step 3

# A rank without tokens has no loss and does not count in that of the run: 5.5 is ln 256.
sed 's/^tokens_per_rank: .*/tokens_per_rank: [200, 0]/' two.yaml > uneven.yaml
expect 0 . capture uneven.yaml --data "$small" -o uneven.db --steps 1 --json
awk "BEGIN { exit !($(value first_loss_nats) > 5 && $(value first_loss_nats) < 6) }" ||
    fail "the loss of a rank without tokens counts: $(value first_loss_nats)"

# A checkpoint with the name of the output.
expect 0 . capture two.yaml --data "$small" -o same.db --steps 1 --save same.db
[ "$(echo same.db*)" = 'same.db same.db.ckpt0 same.db.ckpt1' ] || fail "files: $(echo same.db*)"
expect 0 . capture two.yaml --data "$small" -o same.db --steps 1 --load same.db

# A trace whose parts contradict each other.
for change in "replace(value, 'layers: 2', 'layers: 3')" "replace(value, 'rank: 32', 'rank: 31')" "'{'" \
    'NULL'; do
    cp two.db changed.db
    sqlite3 changed.db "UPDATE OR REPLACE run SET value = $change WHERE key = 'scenario'" 2> /dev/null ||
        sqlite3 changed.db "DELETE FROM run WHERE key = 'scenario'"
    expect 3 'changed.db' check changed.db
done
cp two.db changed.db
sqlite3 changed.db 'UPDATE op SET end_ns = entry_ns - 1'
expect 3 "changed.db: step 0, rank 0: '.*' ends before it begins" report changed.db -o other_page
expect 3 '^moesim calibrate: changed.db: step [0-9]*, rank' calibrate changed.db -o host.yaml
cp two.db changed.db
sqlite3 changed.db "UPDATE routing SET ids = x'ffff' || substr(ids, 3) WHERE layer = 1 AND rank = 1"
expect 3 'changed.db: step 1 of the trace, layer 1, rank 1: expert 65535 of 8' simulate changed.db

# The program of a rank names the option that it does not know, also among several.
moesim=$(dirname "$moesim")/moesim-capture
expect 2 '^moesim-capture: unknown option -z (' --steps 1 -zo run.db
expect 2 '^moesim-capture: unknown option --zoo (' --steps 1 --zoo
expect 2 '^moesim-capture: unknown option --help=x (' --help=x
moesim=$1

# A page without gnuplot, ranks without mpirun.
printf '#!/bin/sh\nPATH=/nowhere exec "%s" "$@"\n' "$moesim" > poor
chmod +x poor
rich=$moesim
moesim=$work/poor
expect 4 'gnuplot: not found (package gnuplot-nox)' report two.db -o other_page
expect 4 'mpirun: not found (package openmpi-bin)' capture two.yaml --data "$small" -o three.db
moesim=$rich

# failed CODE LAST_LINE ARGUMENT...: a capture whose ranks say what failed, then it what became of RUN.db
failed()
{
    cases=$((cases + 1))
    want=$1 last=$2
    shift 2
    "$moesim" capture "$@" > out 2> err
    code=$?
    { [ $code -eq "$want" ] && tail -n 1 err | grep -q "^moesim capture: $last$"; } ||
        fail "moesim capture $*: exit code $code, $(head -c 900 err)"
}

# One that fails before its first step leaves the store as it was. Files of ranks that it finds may be those
# of a capture that runs, or all that is left of one.
cp one.db kept.db
echo none > wrong.ckpt0
failed 3 '.* failed (exit code 3); one.db is as it was' one.yaml --data "$small" -o one.db --load wrong
{ cmp -s one.db kept.db && [ "$(echo one.db*)" = one.db ]; } || fail 'a failed capture changed something'
for rank in 0 1; do
    cp one.db four.db.rank$rank
    expect 3 "four.db.rank$rank: exists; merge it with moesim trace merge" \
        capture two.yaml --data "$small" -o four.db
    [ "$(echo four.db*)" = four.db.rank$rank ] && cmp -s one.db four.db.rank$rank ||
        fail "a file of another capture changed: $(echo four.db*)"
    rm four.db.rank$rank
done
# What all ranks refuse is said once. A rank may end before it says it, as another ends the job.
said_once() # TEXT
{
    { [ "$(wc -l < err)" -eq 2 ] && grep -q "^moesim-capture: ranks\{0,1\} [01-]*: $1" err; } ||
        fail "not said once: $(cat err)"
}
failed 3 '.* failed (exit code 3); odd.db is as it was' two.yaml --data "$small" -o odd.db --load wrong
said_once 'wrong.ckpt0: '
failed 5 '.* failed (exit code 5); odd.db is as it was' "$source_dir/tests/cases/drop_tokens/variant_d.yaml" \
    --data "$small" -o odd.db --timeout 5 --unchecked
said_once 'layer 0 forward dispatch: rank 0 sends'
# One that fails later keeps what all ranks recorded.
sed 's/rate: .*/rate: 1e6/' two.yaml > rise.yaml
failed 1 '.* failed (exit code 1); rise.db holds what all ranks recorded' rise.yaml --data "$small" -o rise.db
expect 0 '"complete": false' trace info rise.db --json

# Ranks with other models: each names both sizes and records nothing; unasked, the library fails in its way.
sed 's/hidden: 16/hidden: 64/' two.yaml > wide.yaml
disagree() # [OPTION]
{
    cases=$((cases + 1))
    set -- --data "$small" -o odd.db --timeout 5 "$@"
    OMPI_MCA_orte_execute_quiet=1 mpirun -n 1 "$moesim-capture" --scenario two.yaml "$@" : \
        -n 1 "$moesim-capture" --scenario wide.yaml "$@" > out 2> err
    code=$?
}
disagree
said='layer 0 forward dispatch: rank 0 sends [0-9]* float32 (alltoall) to rank 1, which expects'
for rank in 0 1; do
    grep -q "^moesim-capture: rank $rank: $said [0-9]* float32 (alltoall)$" err ||
        fail "rank $rank: $(head -c 900 err)"
done
{ [ $code -eq 5 ] && [ "$(echo odd.db*)" = 'odd.db.rank0 odd.db.rank1' ]; } ||
    fail "exit code $code, expected 5; files: $(echo odd.db*)"
rm -f odd.db*
disagree --no-agreement
{ [ $code -ne 0 ] && [ $code -ne 5 ] && ! grep -q 'which expects' err; } || fail "asked: exit code $code"
rm -f odd.db*
# A capacity that follows from the own tokens: one scenario, other sizes.
uneven() # [OPTION]
{
    cases=$((cases + 1))
    OMPI_MCA_orte_execute_quiet=1 mpirun -n 2 "$moesim-capture" --scenario \
        "$source_dir/tests/cases/drop_tokens/variant_d.yaml" --data "$small" -o odd.db --timeout 5 "$@" \
        > out 2> err
    code=$?
}
uneven
said='rank 1: layer 0 forward dispatch: rank 0 sends 160 float32 (alltoall) to rank 1, which expects 128'
grep -q "$said" err ||
    fail "uneven: $(head -c 900 err)"
[ $code -eq 5 ] || fail "uneven: exit code $code, expected 5"
rm -f odd.db*
uneven --no-agreement
{ [ $code -ne 0 ] && [ $code -ne 5 ] && ! grep -q 'which expects' err; } || fail "uneven: exit code $code"
rm -f odd.db*
mkdir fake
printf '#!/bin/sh\necho "$@" > asked\nexit 5\n' > fake/mpirun
chmod +x fake/mpirun
rich=$PATH
PATH=$work/fake:$PATH
failed 5 '.* failed (exit code 5); odd.db is as it was' two.yaml --data "$small" -o odd.db --no-agreement
grep -q -e ' --no-agreement$' asked || fail "not passed on: $(cat asked)"
failed 5 '.* failed (exit code 5); odd.db is as it was' two.yaml --data "$small" -o odd.db
grep -q -e --no-agreement asked && fail "passed on unasked: $(cat asked)"
# What no capture can do is refused before ranks start.
rm asked
sed 's/ranks: 2/ranks: 2, pipeline_parallel: 2, micro_batches: 2/' two.yaml > stages.yaml
sed '$a distributed_optimizer: {}' two.yaml > owned.yaml
sed 's/ranks: 2/ranks: 2, micro_batches: [2, 1]/' two.yaml > batches.yaml
for option in --save --load; do
    expect 4 'stages.yaml: checkpoints of pipelines cannot be captured$' \
        capture stages.yaml --data "$small" -o odd.db $option half
    expect 4 'owned.yaml: checkpoints of a distributed optimizer cannot be captured$' \
        capture owned.yaml --data "$small" -o odd.db $option half
done
expect 4 'batches.yaml: micro_batches that differ by rank cannot be captured$' \
    capture batches.yaml --data "$small" -o odd.db
[ ! -e asked ] || fail "mpirun was started: $(cat asked)"
PATH=$rich

# interrupt SCENARIO RANK...: ends it once these ranks have committed steps; what they did is kept.
interrupt()
{
    cases=$((cases + 1))
    scenario=$1
    shift
    "$moesim" capture "$scenario" --data "$small" -o cut.db --steps 1000000 > out 2> err &
    pid=$!
    for rank; do
        until [ "$(stat -c %s "cut.db.rank$rank-wal" 2> /dev/null || echo 0)" -gt 100000 ]; do
            kill -0 $pid 2> /dev/null || break
            sleep 0.1
        done
    done
    kill -TERM $pid
    wait $pid
    code=$?
    { [ $code -eq 130 ] && grep -q '^complete  *no$' out; } ||
        fail "interrupted: exit code $code, $(head -c 300 err out)"
    expect 0 'routing of step' check cut.db
    [ "$(echo cut.db*)" = cut.db ] || fail "files are left: $(echo cut.db*)"
    rm -f cut.db
}
interrupt one.yaml 0
interrupt two.yaml 0 1
# In one step experts get the scenario's counts, in others what routers choose: 15 rows of 256 leave rank 3,
# as float32, or as bfloat16.
for bytes in 4 2; do
    [ $bytes -eq 4 ] && dtype=float32 || dtype=bfloat16
    sed "\$a dtype: $dtype" "$source_dir/tests/cases/starved_rank/expert.yaml" > starved.yaml
    expect 0 '^steps_complete  *3$' capture starved.yaml --data "$small" -o starved.db --steps 3
    for step in 0 1 2; do
        sent=$(sqlite3 starved.db "SELECT bytes FROM op WHERE step = $step AND rank = 3 AND
            label LIKE '% forward combine'")
        [ $step -eq 1 ] && [ "$sent" -eq $((15 * 256 * bytes)) ] && continue
        [ $step -ne 1 ] && [ "$sent" -gt $((15 * 256 * bytes)) ] && continue
        fail "$dtype, step $step: $sent bytes leave rank 3"
    done
done
finish
