#!/bin/sh
# How near predictions come on this host: calibrates on one capture, predicts two that the fit never saw,
# from their scenario and routing alone. Usage: validate.sh MOESIM TEXT [STEPS]. Other programs on the
# machine make the measured steps longer: run it when it is quiet. Exit code 5 when a prediction misses its
# bar.
set -eu
moesim=$(realpath "$1") text=$(realpath "$2") steps=${3:-150}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat > seen.yaml << EOF
model: {layers: 4, hidden: 128, ffn: 256, experts: 16, top_k: 2, heads: 4, sequence: 64}
layout: {ranks: 4, expert_parallel: 4}
tokens_per_rank: 256
dispatcher: alltoall
EOF
sed 's/alltoall/allgather/; $a capacity: {rule: megatron, factor: 1.25}' seen.yaml > allgather.yaml
sed 's/ranks: 4, expert_parallel: 4/ranks: 2, expert_parallel: 2/; s/hidden: 128/hidden: 192/' \
    seen.yaml > wider.yaml
for run in seen allgather wider; do
    "$moesim" capture $run.yaml --data "$text" -o $run.db --steps "$steps" > /dev/null
done
"$moesim" calibrate seen.db -o this_host.yaml
code=0
for run in seen allgather wider; do
    echo
    "$moesim" validate $run.db --topology ./this_host.yaml --max-step-error 20 --max-phase-error 30 || code=$?
done
exit $code
