#!/bin/sh
# gpu.sh [FOLDER] - all that only a GPU can show, in one table: kernels against references, alone and under
# compute-sanitizer; their rates; and a capture on every GPU of this host that the simulator then predicts.
# With a CUDA Toolkit and no GPU: the host's part, and what is skipped. Logs go to FOLDER (build/gpu). Exit
# code 1 when a line fails.
set -u
cd "$(dirname "$0")/.." || exit
out=${1:-build/gpu}
mkdir -p "$out" || exit
table=$out/table.txt
: > "$table"
bad=0

# line NAME LOG COMMAND...: runs it, and writes what became of it.
line()
{
    name=$1 log=$out/$2
    shift 2
    begin=$(date +%s)
    "$@" > "$log" 2>&1
    code=$?
    case $code in
    0) result=passed ;;
    77) result="skipped: $(sed -n 's/^skip: //p' "$log" | head -n 1)" ;;
    *) result="failed ($code), see $log" bad=1 ;;
    esac
    printf '%-44s %5d s  %s\n' "$name" $(($(date +%s) - begin)) "$result" | tee -a "$table"
}

built() { cmake --preset cuda && cmake --build --preset cuda; }
on_host() { ctest --preset cuda -E '^gpu_'; }
line 'build' build.log built
[ $bad = 0 ] || exit 1
tests=build/cuda/tests
line 'kernels of every architecture' kernels.log ctest --preset cuda -R '^cuda_kernels$'
line 'kernels and runtime on the host' host.log on_host
for test in "$tests"/gpu_[!b]*; do
    [ -x "$test" ] && line "$(basename "$test")" "$(basename "$test").log" "$test"
done
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
[ "$gpus" -gt 0 ] || { echo 'no GPU: rates, compute-sanitizer and the capture are left out' && exit $bad; }

if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        line "$tool gpu_permute" "$tool.log" \
            compute-sanitizer --tool $tool --error-exitcode 9 "$tests/gpu_permute"
    done
fi
line 'rates and combine against scatter-add' rates.log "$tests/gpu_bench_kernels"
line 'grouped against dense products' gemm.log env "MOESIM_GPU_MODULE=$PWD/build/cuda/libmoesim_cuda.so" \
    "$tests/bench_cuda_gemm"
cat "$out/rates.log" "$out/gemm.log"

# The GPUs of this host as ranks, 20 steps; calibrated on it, validate predicts them.
captured()
{
    cat > "$out/gpus.yaml" << EOF
model: {layers: 4, hidden: 1024, ffn: 1024, experts: 8, top_k: 2, heads: 8, sequence: 512}
layout: {ranks: $gpus, expert_parallel: $gpus}
tokens_per_rank: 2048
dispatcher: alltoall
EOF
    moesim=build/cuda/moesim
    $moesim capture "$out/gpus.yaml" --data README.md -o "$out/gpus.db" --device cuda --steps 20 &&
        $moesim calibrate "$out/gpus.db" -o "$out/gpus.topology.yaml" &&
        $moesim validate "$out/gpus.db" --topology "$out/gpus.topology.yaml"
}
line "capture on $gpus GPUs, predicted" capture.log captured
cat "$out/capture.log"
exit $bad
