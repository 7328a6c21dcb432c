#!/bin/sh
# moesim compare: the grid, its threads, its ranking, its words and its results in a store.
. "$(dirname "$0")/lib.sh"

sed 's/skew: 0.5/skew: 1/' "$small" > skewed.yaml
grid='--vary topology=dgx_h100,gb200_nvl72,pcie_box --vary dispatcher=alltoall,allgather'
grid="$grid --vary capacity=dropless,1,1.25"

# ---- any number of threads gives the same bytes, also of errors ----
cat > model.yaml << EOF
model: {preset: olmoe_1b_7b, layers: 1}
layout: {ranks: 16}
tokens_per_rank: 64
routing: {skew: 1, seed: 7}
topology: dgx_h100
EOF
wide='--vary ep=2,3,8,16,128 --vary rank_order=consecutive,strided --vary capacity=dropless,1'
for threads in 1 2 7; do
    for json in '' --json; do
        # shellcheck disable=SC2086 # several arguments
        expect 0 . compare model.yaml $wide --threads $threads -o "wide$threads.db" $json
        mv out "wide$threads$json"
        cmp "wide1$json" "wide$threads$json" || fail "$threads threads: other bytes"
    done
done
cmp wide1.db wide2.db && cmp wide1.db wide7.db || fail 'other results in the store'
grep -q '^no result: .*, capacity megatron:1, ep 3, strided: expert_parallel 3 does not' wide1 ||
    fail "a variant that cannot be: $(cat wide1)"
[ "$(grep -c '^no result: .*, ep 128, .*does not divide' wide1)" -eq 4 ] || fail "ep 128: $(cat wide1)"
expect 3 'expert_parallel 3 does not divide ranks 16' compare model.yaml --vary ep=3,5

# ---- a dispatcher that drops nothing: its variants with a capacity say so; ep is not the scenario's ----
once='--vary dispatcher=deepep'
# shellcheck disable=SC2086 # several arguments
expect 0 '^best: ' compare model.yaml $once --vary capacity=1,dropless --vary ep=2,16
[ "$(grep -c 'no result: .*, capacity megatron:1, .*with capacity rule megatron, expected' out)" -eq 2 ] ||
    fail "a capacity it does not know: $(cat out)"
[ "$(grep -c '^dropless' out)" -eq 2 ] || fail "results: $(cat out)"
# shellcheck disable=SC2086 # several arguments
expect 3 'deepep does not go with capacity rule megatron' compare model.yaml $once --vary capacity=1
sed '$a capacity: {rule: megatron}' model.yaml > capped.yaml
# shellcheck disable=SC2086 # several arguments
expect 0 '^best: dgx_h100 with deepep: ' compare capped.yaml $once --vary capacity=dropless

# ---- a dispatcher whose kernels need NVLink: a bus has no result, others have ----
# shellcheck disable=SC2086 # several arguments
expect 0 '^best: dgx_h100 with deepep: ' compare model.yaml $once --vary topology=dgx_h100,pcie_box
grep -q 'no result: pcie_box with deepep: pcie_box: .*expected kind switch$' out || fail "a bus: $(cat out)"
# Kernels that only some machines have numbers of, or only within one NVLink domain.
fast='--vary dispatcher=deepep_low_latency,nvlink_one_sided'
sed 's/ranks: 16/ranks: 8/' model.yaml > eight.yaml
# shellcheck disable=SC2086 # several arguments
expect 0 '^best: ' compare eight.yaml $fast --vary topology=dgx_h100,gb200,gb200_nvl72
said='gb200 with nvlink_one_sided: gb200: ranks 0 and 7 are in different NVLink domains of 4,'
for line in 'no result: dgx_h100 with nvlink_one_sided: .*no block nvlink_one_sided,' "no result: $said" \
    'no result: gb200_nvl72 with deepep_low_latency: .*no block deepep_low_latency,' \
    '^dgx_h100 *deepep_low_latency ' '^gb200_nvl72 *nvlink_one_sided '; do
    grep -q "$line" out || fail "no '$line': $(cat out)"
done
# shellcheck disable=SC2086 # several arguments
expect 3 'pcie_box: intra is of kind shared' compare model.yaml $once --vary topology=pcie_box

# ---- 18 variants: their table is in the order of time per kept token, from best to worst ----
# shellcheck disable=SC2086 # several arguments
expect 0 '^best: ' compare skewed.yaml $grid -o results.db
cp out table
[ "$(awk 'length > 132' table | grep -vc '^[a-z]*: ')" -eq 0 ] || fail 'the table is wide'
awk '
    /^topology  *dispatcher  *capacity  *to_best/ { on = 1; next }
    /^$/ { on = 0 }
    on && ($4 < last || $3 == "dropless" && $6 != 0 || $3 == "megatron:1" && $6 <= 0) { bad = 1 }
    on { n++; last = $4 }
    END { exit bad || n != 18 }' table || fail "not 18 rows in order: $(cat table)"
# What SQL finds in the store is what the words say.
sql() { sqlite3 -separator ' ' results.db "$1"; }
sql "SELECT topology, 'with', dispatcher || ',', 'capacity', CASE capacity WHEN 0 THEN 'dropless' ELSE
    printf('megatron:%g', capacity) END FROM result ORDER BY step_us / (1 - dropped_share), id" > order
best=$(head -n 1 order)
grep -q "^best: $best: " table && grep -q "^next: $(sed -n 2p order) takes " table &&
    grep -q "^worst: $(tail -n 1 order) takes " table || fail "expected $best: $(tail -n 3 table)"
[ "$(sql "SELECT COUNT(DISTINCT dropped_share) FROM result")" -eq 3 ] || fail 'dropped shares'
[ "$(sql "SELECT DISTINCT expert_parallel || rank_order FROM result")" = 4consecutive ] || fail 'own values'

# ---- why: the terms add up, and the one that decides is the largest; C rows of each expert are kept ----
# shellcheck disable=SC2086 # several arguments
expect 0 moesim.compare/4 compare skewed.yaml $grid --json
awk -F'[:,]' '
    function near(a, b) { return a - b < 1e-3 && b - a < 1e-3 } # us of a step of 1e3, written with 12 digits
    /"why"/ { why = 1 }
    why && /"longer_us"/ { longer = $2; sum = 0; most = -1e30; n++ }
    why && /"term"/ { gsub(/[ "]/, ""); term = $2 }
    why && /"[a-z]*_us"/ && !/longer/ {
        gsub(/[ "]/, ""); sum += $2; if ($2 > most) { most = $2 + 0; largest = $1 }
        if ($1 == "dropping_us" && (!near(sum, longer) || term != largest)) bad = 1
    }
    END { exit bad || n != 2 }' out || fail "the terms: $(sed -n '/"why"/,$p' out)"

# ---- rank order: 2 nodes of 8. With neighbours in a group only gradients go by NIC: of the experts, 8 x 3 x
# 2048 x 1024 floats to and from each of 16 ranks, and of the rest 17,438,720 floats, which NCCL sums by trees
# on two nodes: all of it each way; 64 counts of experts too. Strided, the experts' copies are in a node, and
# tokens cross instead. ----
expect 0 . compare model.yaml --vary ep=8 --vary rank_order=consecutive,strided -o order.db
sqlite3 order.db 'SELECT inter_bytes FROM result ORDER BY id' | awk '
    { bytes[NR] = $1 - 17438720 * 4 * 2 - 64 * 8 * 2 }
    END {
        if (bytes[1] != 16 * 8 * 3 * 2048 * 1024 * 4 || bytes[2] <= 0 || bytes[2] >= bytes[1] / 10)
            print bytes[1], bytes[2]
    }' > differ
[ ! -s differ ] || fail "by NIC: $(cat differ)"

# ---- a capacity of the scenario itself ----
sed '$a capacity: {rule: megatron, factor: 1.5, pad: true}' skewed.yaml > own.yaml
expect 0 '"capacity": "megatron:1.5"' compare own.yaml --vary topology=dgx_h100 --json
[ "$(value dropped_share)" != 0.0 ] && [ "$(value padded_share)" != 0.0 ] || fail "$(cat out)"
dropped=$(value dropped_share) padded=$(value padded_share)
expect 0 '^capacity: .* of the rows dropped' simulate own.yaml
expect 0 '"dropped_rows": ' simulate own.yaml --json
awk -v rows="$(value chosen_rows)" -v tokens="$(value tokens)" -v k="$(value top_k)" \
    -v layers="$(value layers)" -v d="$(value dropped_rows)" -v p="$(value padded_rows)" \
    -v share="$dropped" -v pads="$padded" 'BEGIN {
        exit !(rows == tokens * k * layers && d > 0 && d / rows - share < 1e-9 && share - d / rows < 1e-9 &&
            p / rows - pads < 1e-9 && pads - p / rows < 1e-9) }' || fail 'simulate drops other rows'

# Rules side by side: each says which it is; a factor alone is of the scenario's rule, or of the first that
# limits. Tutel's factor 0 drops nothing, below it no more than above.
rules='dropless tutel:0 tutel:-1 tutel megatron:1 deepspeed:1.25'
expect 0 '^best: .*, capacity dropless' compare skewed.yaml --vary capacity=1,dropless,tutel:0,tutel:-1 \
    --vary capacity=tutel,deepspeed:1.25
for rule in $rules; do
    [ "$(grep -c "^$rule  *[0-9.]" out)" -eq 1 ] || fail "no row $rule: $(cat out)"
done
awk '$1 == "tutel:0" && $4 != 0 || $1 == "tutel:-1" && $4 <= 0 { exit 1 }' out || fail "dropped: $(cat out)"
sed '$a capacity: {rule: tutel, align: 8}' skewed.yaml > tutel.yaml
expect 0 '^tutel:0 ' compare tutel.yaml --vary capacity=0,1.5,megatron:1.5
grep -q '^tutel:1.5 ' out && grep -q '^megatron:1.5 ' out || fail "rules: $(cat out)"
# Here padded, and nowhere else: neither dropless nor another rule takes that over.
expect 0 . compare own.yaml --vary topology=dgx_h100 --vary capacity=dropless,tutel:1.5 --json
[ "$(grep -c '"padded_share": 0.0' out)" -eq 2 ] || fail "pad is of another rule: $(cat out)"
# The scenario's rule keeps its other keys (here a capacity up to a multiple of 8), another has its defaults.
dropped_share()
{
    expect 0 . compare "$1" --vary topology=dgx_h100 --vary capacity="$2" --json
    value dropped_share
}
[ "$(dropped_share tutel.yaml 1.5)" = "$(dropped_share tutel.yaml tutel:1.5)" ] || fail 'align is not kept'
[ "$(dropped_share tutel.yaml 1.5)" != "$(dropped_share skewed.yaml tutel:1.5)" ] ||
    fail 'align is everywhere'

# Variants with and without an interval: that is said, and only then.
sed '$a dtype: bfloat16' "$small" > half.yaml
expect 0 '^not known: the machine is not calibrated' compare half.yaml --vary topology=h100_sxm,pcie_box
expect 0 '+-[0-9]* %' compare half.yaml --vary topology=h100_sxm,dgx_h100
grep -q 'not known' out && fail "$(cat out)"

# ---- wrong variants: 64 tokens of a rank, room for 32. The faster is wrong, so it is marked, and not best;
# where all are wrong, none is. ----
cat > room.yaml << EOF
model: {layers: 2, hidden: 64, ffn: 64, experts: 8, top_k: 2, heads: 0}
layout: {ranks: 8, expert_parallel: 4}
tokens_per_rank: 64
max_dispatch_tokens: 32
dispatcher: deepep_low_latency
topology: dgx_h100
EOF
warned()
{
    cases=$((cases + 1))
    "$moesim" compare room.yaml --vary "$@" > out 2> err || fail "compare room.yaml: $(cat err)"
    said='^moesim compare: warning: room.yaml: 1 of [12] variants are wrong, dgx_h100 with deepep_low_latency'
    grep -q "$said: error C10" err && [ "$(wc -l < err)" -eq 1 ] || fail "no warning: $(cat err)"
}
both=dispatcher=deepep_low_latency,alltoall
warned $both
grep -q '^deepep_low_latency  *wrong: C10  *0\.[0-9]* ' out &&
    grep -q '^best: dgx_h100 with alltoall: ' out && ! grep -q '^next' out &&
    ! grep -q '^alltoall .*wrong' out || fail "a wrong one is best: $(cat out)"
warned $both --json
[ "$(value best)" = 1 ] || fail "best of JSON: $(value best)"
warned dispatcher=deepep_low_latency
grep -q '^wrong: C10  *[0-9]' out && grep -q '^best: none, what has a result is wrong$' out &&
    ! grep -q to_best out || fail "a best of wrong ones: $(cat out)"
warned dispatcher=deepep_low_latency --json
[ "$(value best) $(value to_best)" = 'null null' ] || fail "JSON without a best: $(value best)"
finish
