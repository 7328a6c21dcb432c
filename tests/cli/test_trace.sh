#!/bin/sh
# moesim trace merge, export, import: a capture out and back, files of others in and out, wrong ones refused.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }
others=${MOESIM_DATA:-}/examples/synthetic
[ -d "$others" ] || { echo 'skip: no example files (MOESIM_DATA)' && exit 77; }
sed 's/ranks: 4, expert_parallel: 4/ranks: 2/' "$small" > two.yaml

routing()
{
    sqlite3 "$1" 'SELECT step, layer, rank, n_tokens, top_k, hex(ids) FROM routing ORDER BY step, layer, rank'
}

# What ranks leave that nobody merges: a capture that was started by hand.
mpirun -n 2 "$moesim-capture" --scenario two.yaml --data "$demo" -o run.db --steps 3
[ "$(echo run.db*)" = 'run.db.rank0 run.db.rank1' ] || fail "files of ranks: $(echo run.db*)"
cp two.yaml kept.yaml
expect 3 'two.yaml: exists and is no trace store' trace merge run.db -o two.yaml
expect 3 'absent.db.rank0: No such file' trace merge absent.db
mv run.db.rank1 away
expect 3 'run.db.rank1: No such file' trace merge run.db
mv away run.db.rank1
expect 2 'run.db.rank0: a rank file of this merge' trace merge run.db -o ../"${PWD##*/}"/run.db.rank0
echo mine > merged.db.partial
expect 3 'merged.db.partial: exists and is no trace store' trace merge run.db -o merged.db
echo mine | cmp -s merged.db.partial - || fail 'merged.db.partial was changed'
rm merged.db.partial
cp run.db.rank0 away
sqlite3 run.db.rank0 "DELETE FROM run WHERE key = 'ranks'"
expect 3 "run.db.rank0: no run key 'ranks'" trace merge run.db -o merged.db
mv away run.db.rank0
expect 0 '^complete  *yes$' trace merge run.db -o merged.db
[ "$(echo run.db* merged.db*)" = 'run.db* merged.db' ] || fail "files: $(echo run.db* merged.db*)"
cmp -s two.yaml kept.yaml || fail 'two.yaml was changed'

routing merged.db > routing
for format in megatron npy; do
    expect 0 '^routings  *12$' trace export merged.db --format $format -o $format
    expect 0 '"schema": "moesim.trace.import/1"' trace import $format/* --format $format -o back.db --json
    routing back.db | cmp -s routing - || fail "$format: other routing"
    expect 3 'back.db: holds no scenario, give one: SCENARIO --routing back.db' check back.db
    expect 0 '; routing of step 1$' check two.yaml --routing back.db --step 1
    expect 0 '^files  *[12]$' trace export merged.db --format $format -o one --step 2
done
[ "$(ls megatron npy | wc -l)" -eq 11 ] || fail "files: $(ls megatron npy)"

expect 0 . trace import --format megatron "$others/router_trace_rank0.jsonl" -o other.db
expect 0 . trace export other.db --format megatron -o other.jsonl
cmp -s other.jsonl "$others/router_trace_rank0.jsonl" || fail 'megatron: other bytes'
expect 0 '^layers  *3$' trace import "$others/routed_experts_5x3x2.npy" --format npy -o other.db
expect 3 'other.db: its routing is not of 2 ranks, 2 layers' simulate two.yaml --routing other.db
expect 0 . trace export other.db --format npy -o other.npy
cmp -s other.npy "$others/routed_experts_5x3x2.npy" || fail 'npy: other bytes'

head -c 200 other.jsonl > cut.jsonl
cp other.db kept.db
expect 3 'cut.jsonl:2: not JSON' trace import other.jsonl cut.jsonl --format megatron -o other.db
expect 3 'other.jsonl: not a .npy file' trace import other.jsonl --format npy -o other.db
expect 3 'absent.npy: cannot be read' trace import absent.npy --format npy -o other.db
expect 3 '/dev/zero: not a regular file' trace import /dev/zero --format megatron -o other.db
expect 3 'two.yaml: exists and is no trace store' trace import other.npy --format npy -o two.yaml
expect 3 'other.jsonl: no moesim store' trace export other.jsonl --format npy -o folder
expect 3 'other.db: no complete step 9' trace export other.db --format npy -o folder --step 9
expect 2 'o.npy: one file is not enough' trace export merged.db --format npy -o o.npy
expect 2 'format npyy: unknown format, did you mean npy' trace import other.npy --format npyy -o other.db
expect 2 '--format FORMAT is required' trace export other.db -o folder
expect 2 'expected FILE...' trace import --format npy -o other.db
expect 2 "unexpected 'b'" trace export other.db b
expect 1 'absent/o.db' trace import other.npy --format npy -o absent/o.db
cmp -s other.db kept.db || fail 'a refused import changed a trace'
{ [ "$(echo ./*.partial)" = './*.partial' ] && [ ! -e folder ]; } || fail "files are left: $(ls)"
finish
