#!/bin/sh
# Every scenario of tests/cases: the classes of the errors that check finds are those in FILE.expected.
. "$(dirname "$0")/lib.sh"

for file in "$source_dir"/tests/cases/*/*.yaml; do
    [ -e "$file" ] || fail "no cases in $source_dir/tests/cases"
    cases=$((cases + 1))
    [ -e "$file.expected" ] || fail "$file.expected is missing"
    "$moesim" check "$file" --json > out 2> err
    code=$?
    # A verdict begins with its class; the severity is on the next line.
    sed -n '/"class": /{N;s/.*"class": "\(C[0-9]*\)",.*"severity": "error".*/\1/p;}' out |
        sort -u > found
    cmp -s found "$file.expected" ||
        fail "$file: found $(paste -sd, found), expected $(paste -sd, "$file.expected"): $(head -c 300 err)"
    want=5
    [ -s "$file.expected" ] || want=0
    [ $code -eq $want ] || fail "$file: exit code $code, expected $want"
done

# What a user reads: both capacities (4 and 3 rows x 2 experts x 8 elements), and what may come of it.
variant=$source_dir/tests/cases/drop_tokens/variant
said='dispatch: rank 0 sends 64 float32 (alltoall) to rank 1, which expects 48 float32 (alltoall);'
said="$said the outcome is one of: hang, silent wrong data, truncated, desynchronised\$"
for v in a b; do
    "$moesim" check "${variant}_$v.yaml" > out
    grep -q "$said" out || fail "variant $v: $(cat out)"
    "$moesim" check "${variant}_$v.yaml" --json > out
    [ "$(value outcomes)" = '[' ] || fail "variant $v: no outcomes: $(cat out)"
done
# One mistake of gradient_sync is one line, which names where it stands; --json counts what it concerns.
never=$source_dir/tests/cases/atlas/gradients_are_never_summed.yaml
"$moesim" check "$never" > out
line=$(grep -n '^gradient_sync' "$never" | cut -d: -f1)
said="each of 7 parameters (first attention_gain, wqkv, wo) lacks"
grep -q "^error C4 ranks 0-3: $never:$line: .*$said" out &&
    [ "$(grep -c '^error' out)" -eq 1 ] || fail "never summed: $(cat out)"
"$moesim" check "$never" --json > out
[ "$(value errors)" = 1 ] && [ "$(value n_parameters)" = 7 ] && [ "$(value line)" = "$line" ] ||
    fail "never summed: $(cat out)"
expect 0 '^  C9 equality' check --help
# What agrees by chance is possible, and no error; what the group agrees on is neither.
"$moesim" check "${variant}_a_by_chance.yaml" > out
grep -q '^possible C1 ranks 0-1: layer 0 forward dispatch: its sizes follow from largest_count' out ||
    fail "by chance: $(cat out)"
"$moesim" check "${variant}_c.yaml" > out
grep -q possible out && fail "agreed: $(cat out)"

# --stress finds what breaks a rule: for each class the smallest tokens and routing, as a scenario that check
# refuses alike.
for v in a b d; do
    "$moesim" check --stress "${variant}_$v.yaml" > out
    [ $? -eq 5 ] || fail "stress of $v: $(cat out)"
    awk '/^# error C1/ {on = 1} /^---/ {on = 0} on' out > stressed.yaml
    "$moesim" check stressed.yaml | grep -q '^error C1' || fail "stress of $v: check finds no C1"
    "$moesim" check --stress "${variant}_$v.yaml" --json > out
    grep -q '"schema": "moesim.stress/2"' out && grep -q '"complete": true' out &&
        [ "$(value tokens)" -gt 0 ] ||
        fail "stress of $v: $(head -c 200 out)"
done
# Smaller tokens than the rule takes at all are not adverse: the smallest has one rank that it takes.
"$moesim" check --stress "${variant}_c.yaml" > out
grep -q '^tokens_per_rank: \[3, 0\]' out || fail "stress of c begins below min_capacity: $(cat out)"
grep -q '^# error C8' out && ! grep -q '^# error C1' out || fail "stress of c: $(cat out)"
right=$source_dir/tests/cases/shared_parameters/right.yaml
expect 0 '^# 134 routings tried, nothing breaks it$' check --stress "$right"
# However the scenario is written; what is wrong at any size is shown at the smallest.
printf '{"layout": {ranks: 2}, model: {layers: 1, hidden: 8, ffn: 8, experts: 4, top_k: 1},\n' > flow.yaml
printf '"tokens_per_rank": [8,\n8], gradient_sync: [{do: update}], clip_norm: 0}\n' >> flow.yaml
"$moesim" check --stress flow.yaml > out
grep -q '^tokens_per_rank: \[1, 0\]' out || fail "stress of what is always wrong: $(cat out)"
awk '/^---/ {on = 1; next} on' out > stressed.yaml # C3 is not seen of one token
"$moesim" check stressed.yaml | grep -q '^error C4' || fail "stress of a flow mapping: check finds no C4"
sed 's/gradient_sync.*clip/dispatcher: deepep, clip/' flow.yaml > deepep.yaml
expect 3 'deepep.yaml: --stress cannot be used with dispatcher deepep: ' check --stress deepep.yaml
# One token on every rank, evenly spread, is on the first expert: that breaks it too, and is said.
cat > detach.yaml << EOF
model: {layers: 2, hidden: 8, ffn: 8, experts: 8, top_k: 1, heads: 0}
layout: {ranks: 4, expert_parallel: 4}
tokens_per_rank: 32
empty_rank: detach
EOF
"$moesim" check --stress detach.yaml > out
grep -q '^# the smallest of C2 of sizes that evenly spread rows do not break: ' out &&
    grep -q '^# with [1-9] tokens* on every rank, and maybe fewer, evenly spread rows break it too' out ||
    fail "stress of detach does not say what it leaves out: $(cat out)"
expect 2 'expected a scenario' check --stress "${variant}_c.yaml" --step 3
# A step with wrong gradients has a time; that it is wrong is said beside it, in one line.
for file in "${right%/*}"/*.yaml "$source_dir"/tests/cases/tied_embedding/*.yaml; do
    for command in 'simulate --topology dgx_h100' 'compare --vary topology=dgx_h100,pcie_box'; do
        cases=$((cases + 1))
        # shellcheck disable=SC2086 # words
        "$moesim" $command "$file" --json > out 2> err
        code=$?
        class=$(sed -n 's/^moesim [a-z]*: warning: .*: error \(C[0-9]*\) ranks .* (run moesim check)$/\1/p' \
            err)
        [ $code -eq 0 ] || fail "$command $file: exit code $code"
        if [ -s "$file.expected" ]; then
            { [ "$(wc -l < err)" -eq 1 ] && grep -q "^$class$" "$file.expected" &&
                grep -q "\"class\": \"$class\"" out && ! grep -q ': [013-9] of' err; } ||
                fail "$command $file: not said: $(cat err)"
        else
            { [ ! -s err ] && grep -q '"verdicts": \[\]' out; } || fail "$command $file: $(cat err)"
        fi
    done
done
# One that does not end has none; its verdicts and the reason are in the JSON.
for command in 'simulate --topology dgx_h100' 'compare --vary topology=dgx_h100'; do
    cases=$((cases + 1))
    # shellcheck disable=SC2086
    "$moesim" $command "${variant}_a.yaml" --json > out 2> err
    code=$?
    said='"error": "dgx_h100: layer 0 forward dispatch: rank 0 sends 64 elements, rank 1 expects 48'
    { [ $code -eq 5 ] && [ "$(wc -l < err)" -eq 1 ] && [ "$(value class)" = C1 ] &&
        ! grep -q step_us out && grep -q "$said" out; } ||
        fail "$command: exit code $code, $(cat err out)"
done
set -- --topology dgx_h100
expect 5 'rank 0 sends 64 elements, rank 1 expects 48' simulate "${variant}_a.yaml" "$@"
expect 0 'capacity: 0.0 % of the rows dropped, 357.1 % padded' simulate "${variant}_c.yaml" "$@"
finish
