#!/bin/sh
# How near predictions come on this host: calibrates on one capture, predicts two others that the fit never
# saw, from their scenario and routing alone. Usage: validate.sh MOESIM TEXT [STEPS [ROUNDS]].
#
# A host is not the same from minute to minute, so the three are captured in turns, ROUNDS (3) times, and each
# is judged by its middle round. The first is captured again in later rounds, which show the drift; its first
# round, which was fitted, is printed and not judged. Other programs on the machine make the measured steps
# longer: run it when it is quiet. Bars: step 20 %, each phase of 5 % of it or more 30 %. Exit code 5 when
# more than half the judged rounds of one miss a bar.
set -eu
moesim=$(realpath "$1") text=$(realpath "$2") steps=${3:-150} rounds=${4:-3}
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
for round in $(seq "$rounds"); do
    for run in seen allgather wider; do
        "$moesim" capture $run.yaml --data "$text" -o "$run$round.db" --steps "$steps" > /dev/null
    done
done
"$moesim" calibrate seen1.db -o this_host.yaml
code=0
for run in seen allgather wider; do
    missed=0 judged=0
    for round in $(seq "$rounds"); do
        echo
        if [ $run$round = seen1 ]; then
            "$moesim" validate seen1.db --topology ./this_host.yaml
            continue
        fi
        judged=$((judged + 1))
        "$moesim" validate "$run$round.db" --topology ./this_host.yaml --max-step-error 20 \
            --max-phase-error 30 || missed=$((missed + 1))
    done
    echo "$run: $missed of $judged rounds missed a bar"
    [ $((2 * missed)) -le $judged ] || code=5
done
exit $code
