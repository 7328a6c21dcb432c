#!/bin/sh
# test_cuda_faults.sh MOESIM MODULE: what goes wrong on a GPU or in NCCL, planted in the doubles on one rank
# of 4: a clear error within the timeout, exit code 1, no process left, and traces whose files can be read or
# are gone.
. "$(dirname "$0")/lib.sh"
export MOESIM_GPU_MODULE="$2" MOE_DOUBLE_GPUS=4
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

# fails NAME PATTERN VARIABLE=VALUE...
fails()
{
    cases=$((cases + 1))
    name=$1 pattern=$2
    shift 2
    code=0
    env "$@" timeout 60 "$moesim" capture "$small" --data "$small" -o run.db --steps 2 --device cuda \
        --timeout 3 > out 2> err || code=$?
    [ $code = 1 ] || fail "$name: exit code $code: $(cat err)"
    grep -q -e "$pattern" err || fail "$name: no error like '$pattern': $(cat err)"
    ! pgrep -f "$PWD/run.db" > left || fail "$name: processes are left: $(cat left)"
    for part in run.db*; do
        [ ! -e "$part" ] || sqlite3 "$part" 'PRAGMA integrity_check' | grep -q '^ok$' || fail "$name: $part"
    done
    echo "$name: $(grep -e "$pattern" err | head -n 1)"
    rm -f run.db*
}

fails kernel 'rank 1: .*cudaErrorIllegalAddress' MOE_DOUBLE_FAIL=kernel:50:700:1
fails gemm 'rank 2: .*cudaErrorIllegalAddress' MOE_DOUBLE_FAIL=gemm:5:700:2
fails group 'rank 1: .*alltoall: unhandled system error' MOE_DOUBLE_NCCL=error:40:1
fails remote 'rank 1: ' MOE_DOUBLE_NCCL=remote:40:1

# Ranks whose sizes differ: they say so before; without asking, both wait for what does not come.
cat > unequal.yaml << EOF
model: {layers: 1, hidden: 8, ffn: 8, experts: 4, top_k: 1}
layout: {ranks: 2, expert_parallel: 2}
tokens_per_rank: 8
dispatcher: gshard
capacity: {rule: deepspeed, drop_tokens: false, agree: false}
routing: {counts: [[[6, 2, 0, 0], [2, 2, 2, 2]]], step: 0}
EOF
unequal()
{
    cases=$((cases + 1))
    code=0
    timeout 60 "$moesim" capture unequal.yaml --data "$small" -o run.db --steps 1 --device cuda --timeout 3 \
        --unchecked $3 > out 2> err || code=$?
    { [ $code = "$1" ] && grep -q "$2" err; } || fail "unequal sizes: exit code $code: $(cat err)"
}
unequal 5 'rank 0 sends 96 float32 (alltoall) to rank 1, which expects 32' ''
unequal 1 'layer 0 forward dispatch on communicator ep (ranks 0-1): no answer for 3 s; this rank sends ' \
    --no-agreement

fails missing 'no answer for 3 s\|rank 2' MOE_DOUBLE_NCCL=dead:40:2
finish
