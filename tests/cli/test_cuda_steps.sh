#!/bin/sh
# test_cuda_steps.sh MOESIM MODULE [STEPS]: whole training steps on 4 ranks by the GPU part, on doubles of
# CUDA, cuBLAS and NCCL, against the same steps on the CPU: losses, and every gradient and parameter by `check
# --against`, whose words say whether any differs by more than rounding. In float64 losses agree to 1e-12 (13
# digits of 16 are left to the order of sums); streams run in another order with each seed.
. "$(dirname "$0")/lib.sh"
export MOESIM_GPU_MODULE="$2" MOE_DOUBLE_GPUS=4
steps=${3:-2}
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

loss() { sqlite3 "$1" 'SELECT step, rank, loss FROM step ORDER BY step, rank'; }

# as_on_cpu NAME LINE...: a small model in float64 with these lines.
as_on_cpu()
{
    cases=$((cases + 1))
    name=$1
    shift
    printf '%s\n' 'model: {layers: 2, hidden: 16, ffn: 16, experts: 8, top_k: 2, heads: 2, sequence: 16}' \
        'tokens_per_rank: 16' 'dtype: float64' "$@" > "$name.yaml"
    for device in cpu cuda; do
        MOE_DOUBLE_SEED=$cases "$moesim" capture "$name.yaml" --data "$small" -o "$name.$device.db" \
            --steps "$steps" --tensors=values --device $device > out 2>&1 ||
            fail "$name on $device: $(tail -n 3 out)"
        loss "$name.$device.db" > $device
    done
    paste -d'|' cpu cuda | awk -F'|' -v name="$name" '
        $3 != "" { n++; d = $3 - $6; if (d < 0) d = -d; if (!(d <= 1e-12 * $3)) bad = 1 }
        END { exit bad || !n }' || fail "$name: other losses: $(paste cpu cuda)"
    "$moesim" check "$name.cuda.db" --against "$name.cpu.db" > out 2>&1 || fail "$name: $(head -n 3 out)"
    grep -q ' in this stage [0-9]* differ, 0 of them by more than rounding\|are the same to the bit' out ||
        fail "$name: $(head -n 1 out)"
    echo "$name: $(head -n 1 out)"
    rm -f ./*.db
}

as_on_cpu alltoall 'layout: {ranks: 4, expert_parallel: 4}' 'dispatcher: alltoall'
as_on_cpu allgather 'layout: {ranks: 4, expert_parallel: 2}' 'dispatcher: allgather' 'loss: mean_of_ranks'
as_on_cpu capacity 'layout: {ranks: 4, expert_parallel: 2}' 'dispatcher: alltoall' \
    'capacity: {rule: tutel, factor: 1}'
as_on_cpu buckets 'layout: {ranks: 4, expert_parallel: 2, pipeline_parallel: 2}' 'dispatcher: alltoall' \
    'loss: mean_of_ranks' 'distributed_optimizer: {separate_tied: true}'
finish
