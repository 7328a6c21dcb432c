#!/bin/sh
# How long a step takes in each order on each machine: the scenarios of this folder with a larger model on 16
# ranks, two stages of eight; that some orders are wrong is not repeated. Usage: times.sh MACHINE...
set -eu
cd "$(dirname "$0")"
large='s/hidden: 32, ffn: 8/hidden: 4096, ffn: 2048/; s/ranks: 4/ranks: 16/
s/tokens_per_rank: 1/tokens_per_rank: 2048/; s/float64/bfloat16/; s/sgd/adamw/'
printf '%-12s %-16s %s\n' machine order step_us
for machine; do
    for order in sum_first separate_bucket single_bucket; do
        sed "$large" $order.yaml | moesim simulate /dev/stdin --topology "$machine" 2> /dev/null |
            awk -v row="$(printf '%-12s %-16s' "$machine" $order)" '/^step/ {print row, $2}'
    done
done
