#!/bin/sh
# Wrong command lines, wrong files, a world that fails: the exit code and one line that says what and where.
. "$(dirname "$0")/lib.sh"

# broken NAME SED_SCRIPT: small.yaml with one change
broken()
{
    sed "$2" "$small" > "$1.yaml"
    ! cmp -s "$small" "$1.yaml" || fail "$1: nothing changed"
}

# ---- command lines ----
expect 2 'expected a command'
expect 2 "unknown command 'simulat', did you mean simulate" simulat "$small"
expect 2 "unknown command 'trace', known: trace info, trace merge, trace export, trace import" trace
expect 2 "unknown command 'trace inf', did you mean trace info" trace inf
expect 2 "unknown command 'sim', did you mean simulate" sim
expect 2 "unknown option 'topo', did you mean --topology" simulate "$small" --topo=dgx_h100
expect 2 "unknown command 'xyzzyqwerty' (moesim --help" xyzzyqwerty
expect 2 'moesim check: expected SCENARIO|TRACE' check
expect 2 "unexpected 'two'" check "$small" two
expect 2 "unknown option 'topolgy', did you mean --topology" simulate "$small" --topolgy=dgx_h100
expect 2 "unknown option 'q'" check "$small" -q
expect 2 "unknown option 'vary'" simulate "$small" --vary topology=dgx_h100
expect 2 '--topology: expected T' simulate "$small" --topology
expect 2 '--json takes no value' check "$small" --json=yes
expect 2 '--step 99999999999999999999: expected a whole number' check "$small" --step 99999999999999999999
expect 2 '--step -1: expected a whole number' check "$small" --step -1
expect 2 '--steps 0: expected a whole number from 1' capture "$small" --data "$small" -o run.db --steps 0
expect 2 '--steps 3x: expected' capture "$small" --data "$small" -o run.db --steps 3x
expect 2 '--data FILE is required' capture "$small" -o run.db
expect 2 '--output RUN.db is required' capture "$small" --data "$small"
expect 2 '--output DIR is required' report run.db
expect 2 '--vary KEY=A,B is required' compare "$small"
expect 2 '--vary skew=1: unknown key, known: topology, dispatcher, capacity, ep, rank_order' \
    compare "$small" --vary skew=1
expect 2 '--vary dispacher=a: unknown key, did you mean dispatcher' compare "$small" --vary dispacher=a
expect 2 '--vary topology: an empty value' compare "$small" --vary topology
expect 2 "--vary ep=4,x: no value 'x': expected a number of ranks" compare "$small" --vary ep=4,x
expect 2 "no value 'nan': expected a factor from 1e-06 to 1e+06 of rule megatron" \
    compare "$small" --vary capacity=1,nan
expect 2 "no value 'rule': unknown capacity rule 'rule', known: dropless, megatron, deepspeed, tutel" \
    compare "$small" --vary capacity=rule
expect 2 "no value 'dropless:1': rule dropless has no factor" compare "$small" --vary capacity=dropless:1
expect 2 "no value 'deepspeed:0': expected a factor from 1e-06" compare "$small" --vary capacity=deepspeed:0
expect 2 "dispatcher=foo: .*'foo', known: alltoall, allgather, deepep, deepep_low_latency" \
    compare "$small" --vary dispatcher=foo
expect 2 '--output: a store cannot tell capacity rules megatron and tutel apart' \
    compare "$small" --vary capacity=1,dropless,tutel:1 -o rules.db
sed '$a capacity: {rule: deepspeed, drop_tokens: false}' "$small" > keeps.yaml
expect 2 "no value '2': rule deepspeed has no factor with drop_tokens: false" \
    compare keeps.yaml --vary capacity=megatron,2
expect 2 "no value 'rows': expected consecutive or strided" compare "$small" --vary rank_order=rows
expect 2 '--threads 0: expected a whole number from 1' compare "$small" --vary ep=4 --threads 0
expect 2 '--vary topology=dgx_h100,: an empty value' compare "$small" --vary topology=dgx_h100,
expect 2 '--step: .*small.yaml is not a trace' check "$small" --step 1
expect 2 '-n 3: .*small.yaml has 4 ranks' capture "$small" --data "$small" -o run.db -n 3
nine='--vary topology=a'
nine="$nine $nine $nine"
# shellcheck disable=SC2086 # many arguments
expect 2 '--vary: too many' compare "$small" $nine $nine $nine

# ---- scenarios ----
: > empty.yaml
head -c 3000 "$moesim" > binary.yaml
mkdir folder.yaml
expect 3 'moesim check: absent.yaml: cannot be read: No such file' check absent.yaml
expect 3 'empty.yaml' check empty.yaml
expect 3 'binary.yaml: not a text file' check binary.yaml
expect 3 'folder.yaml: cannot be read: Is a directory' simulate folder.yaml
expect 3 '/dev/zero: ' check /dev/zero
broken missing '/^layout/d'
expect 3 "missing.yaml:2: .*layout" check missing.yaml
broken unknown 's/hidden/hiden/'
expect 3 "unknown.yaml:2: unknown key 'hiden'.*hidden" check unknown.yaml
broken twice 's/^dispatcher.*/tokens_per_rank: 32/'
expect 3 "twice.yaml:5: .*tokens_per_rank" check twice.yaml
broken kind 's/layers: [0-9]*/layers: two/'
expect 3 'kind.yaml:2: .*layers' check kind.yaml
broken huge 's/hidden: [0-9]*/hidden: 99999999999999999999/'
expect 3 'huge.yaml:2: .*hidden' check huge.yaml
broken exponent 's/rate: .*/rate: 1e999/'
expect 3 'exponent.yaml:6: .*learning_rate' check exponent.yaml
broken tokens 's/rank: 32/rank: 123456789/'
expect 3 'tokens.yaml:4: tokens_per_rank: expected a whole number' check tokens.yaml
broken list 's/rank: 32/rank: [1, 2, 3]/'
expect 3 'list.yaml:4: tokens_per_rank lists 3 numbers' check list.yaml
broken divide 's/parallel: 4/parallel: 3/'
expect 3 'divide.yaml:3: expert_parallel 3 does not divide ranks 4' simulate divide.yaml
"$moesim" check divide.yaml > out
[ $? -eq 5 ] || fail "check of a layout that does not divide: exit code $?"
grep -q '^error C13: layout: divide.yaml:3: expert_parallel 3 does not divide ranks 4' out ||
    fail "check of a layout that does not divide: $(cat out)"
broken dispatcher 's/: alltoall/: altoall/'
expect 3 "dispatcher.yaml:5: unknown dispatcher 'altoall', did you mean alltoall" check dispatcher.yaml
broken rule '$a capacity: {rule: megatro}'
expect 3 "rule.yaml:9: unknown capacity rule 'megatro', did you mean megatron" check rule.yaml
broken key '$a capacity:\n  rule: tutel\n  drop: probs'
expect 3 "key.yaml:11: key 'drop' belongs to rule megatron, deepspeed, not tutel" check key.yaml
broken top_k '$a capacity: {rule: deepspeed, seed: 1}'
expect 3 "top_k.yaml:9: key 'seed' of rule deepspeed needs top_k: 1, not 2" check top_k.yaml
broken top_k '$a capacity: {rule: deepspeed, drop: probs}'
expect 3 "top_k.yaml:9: key 'drop' of rule deepspeed needs a top_k of 3 or more, not 2" check top_k.yaml
broken no_rule '$a capacity: {factor: 1}'
expect 3 "no_rule.yaml:9: key 'rule' is missing" check no_rule.yaml
broken preset 's/layers: [0-9]*/preset: mixtral_8x7/'
expect 3 "preset.yaml:2: unknown preset 'mixtral_8x7'.*mixtral_8x7b" check preset.yaml
broken anchor 's/rank: 32/rank: \&a 32/'
expect 3 'anchor.yaml:4: ' check anchor.yaml

# ---- topologies ----
broken without '/^topology/d'
expect 2 'no topology, expected --topology or one in the scenario' simulate without.yaml
expect 3 "dgx_h10.*dgx_h100" simulate "$small" --topology dgx_h10
expect 3 'absent.yaml' simulate "$small" --topology absent.yaml
expect 3 "other' in .*, known: a100_sxm, b200_sxm, dgx_h100, .*, pcie_box" simulate "$small" --topology other
expect 2 "compare: --vary dispatcher=.*'altoall', did you mean alltoall" \
    compare "$small" --vary dispatcher=alltoall,altoall
expect 2 '--format mega: unknown format, did you mean megatron' trace import "$small" --format mega -o r.db
expect 2 '--format csv: unknown format, known: megatron, npy' trace import "$small" --format csv -o r.db
sed 's/3 TB\/s/3 TB/' "$source_dir/topologies/dgx_h100.yaml" > unit.yaml
expect 3 "unit.yaml:[0-9]*: .*memory.*'TB'" simulate "$small" --topology unit.yaml
sed 's/ 3 TB\/s/ 3/' "$source_dir/topologies/dgx_h100.yaml" > bare.yaml
expect 3 "bare.yaml:[0-9]*: .*memory.*no unit" simulate "$small" --topology bare.yaml

# ---- trace stores: byte 60 of an SQLite file is its version, byte 68 its program ----
expect 0 'best: ' compare "$small" --vary topology=dgx_h100,pcie_box -o good.db
: > empty.db
head -c 5000 good.db > cut.db
head -c 60 good.db > stub.db
cp good.db other.db
printf 'abcd' | dd of=other.db bs=1 seek=68 conv=notrunc 2> /dev/null
cp good.db newer.db
printf '\0\0\0\377' | dd of=newer.db bs=1 seek=60 conv=notrunc 2> /dev/null
cp good.db noise.db
dd if="$moesim" of=noise.db bs=1 skip=2000 seek=100 count=8000 conv=notrunc 2> /dev/null
for command in check simulate 'trace info'; do
    # shellcheck disable=SC2086 # a command of two words
    set -- $command
    expect 3 'absent.db: ' "$@" absent.db
    expect 3 'empty.db: no moesim store' "$@" empty.db
    expect 3 'cut.db: truncated: 5000 bytes' "$@" cut.db
    expect 3 'stub.db: no moesim store' "$@" stub.db
    expect 3 'other.db: no moesim store' "$@" other.db
    expect 3 'newer.db: store version 255' "$@" newer.db
    expect 3 'noise.db: ' "$@" noise.db
done
expect 3 'good.db: holds no scenario' check good.db
expect 3 'good.db: ' report good.db -o page
expect 3 'small.yaml: no moesim store' trace info "$small"
expect 3 'small.yaml: no moesim store' compare "$small" --vary topology=dgx_h100 -o "$small"

# ---- output ----
expect 1 'absent/r.db: no folder to write to: No such file' capture "$small" --data "$small" -o absent/r.db
expect 3 'empty.yaml: exists and is no trace store' capture "$small" --data "$small" -o empty.yaml
expect 3 '/dev/null: not a regular file' capture "$small" --data /dev/null -o run.db
expect 3 'empty.yaml: 0 bytes, expected at least 17:' capture "$small" --data empty.yaml -o run.db
# Padding by a capacity of its own, which differs between ranks: they would crash.
sed 's/rank: 32/rank: [32, 16, 32, 32]/; $a capacity: {rule: megatron, factor: 1.25, pad: true}' \
    "$small" > padded.yaml
expect 5 'capture: padded.yaml: error C1 ranks .* (run moesim check)' \
    capture padded.yaml --data "$small" -o run.db
[ "$(echo run.db*)" = 'run.db*' ] || fail "files of a refused capture: $(echo run.db*)"
expect 3 'absent.txt: cannot be read' capture "$small" --data absent.txt -o run.db
expect 1 'absent/ck: no folder to write to' capture "$small" --data "$small" -o run.db --save absent/ck
expect 3 'absent.ckpt0: cannot be read' capture "$small" --data "$small" -o run.db --load absent
expect 1 'absent/r.db' compare "$small" --vary topology=dgx_h100 -o absent/r.db
for sink in /dev/full closed pipe; do
    cases=$((cases + 1))
    rm -f pipe
    mkfifo pipe
    # Both ends open, then only the writing one: writing fails at once.
    exec 3<> pipe 4> pipe 3>&-
    case $sink in
    /dev/full) "$moesim" simulate "$small" > /dev/full 2> err ;;
    closed) "$moesim" simulate "$small" >&- 2> err ;;
    pipe) "$moesim" simulate "$small" >&4 2> err ;;
    esac
    code=$?
    exec 4>&-
    { [ $code -eq 1 ] && grep -q '^moesim simulate: standard output: ' err; } ||
        fail "$sink: exit code $code, $(head -c 300 err)"
done

# A type for which the topology has no rate.
sed '$a dtype: bfloat16' "$small" > half.yaml
sed '/matmul_bfloat16/d' "$source_dir/topologies/dgx_h100.yaml" > no_half.yaml
expect 3 'topology dgx_h100: gpu has no matmul_bfloat16' simulate half.yaml --topology ./no_half.yaml
# Where rows cannot be weighed.
for pair in allgather:home:expert deepep:home:expert gshard:expert:home; do
    at=${pair#*:}
    sed "s/^dispatcher:.*/dispatcher: ${pair%%:*}\napply_probs: ${at%:*}/" "$small" > probs.yaml
    said="dispatcher ${pair%%:*} does not go with apply_probs ${at%:*}, expected ${at#*:}"
    expect 3 "$said" check probs.yaml
done
finish
