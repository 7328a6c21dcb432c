#!/bin/sh
# Wrong command lines, wrong files, a world that fails: the exit code and one line that says what and where.
. "$(dirname "$0")/lib.sh"

# broken NAME SED_SCRIPT: the demo with one change
broken()
{
    sed "$2" "$demo" > "$1.yaml"
    ! cmp -s "$demo" "$1.yaml" || fail "$1: nothing changed"
}

# ---- command lines ----
expect 2 'expected a command'
expect 2 "unknown command 'simulat', did you mean simulate" simulat "$demo"
expect 2 "unknown command 'trace'" trace
expect 2 "unknown command 'xyzzyqwerty' (moesim --help" xyzzyqwerty
expect 2 'moesim check: expected SCENARIO|TRACE' check
expect 2 "unexpected 'two'" check "$demo" two
expect 2 "unknown option 'topolgy', did you mean --topology" simulate "$demo" --topolgy=dgx_h100
expect 2 "unknown option 'q'" check "$demo" -q
expect 2 "unknown option 'vary'" simulate "$demo" --vary topology=dgx_h100
expect 2 '--topology: expected T' simulate "$demo" --topology
expect 2 '--json takes no value' check "$demo" --json=yes
expect 2 '--step 99999999999999999999: expected a whole number' check "$demo" --step 99999999999999999999
expect 2 '--step -1: expected a whole number' check "$demo" --step -1
expect 2 '--steps 0: expected a whole number from 1' capture "$demo" --data "$demo" -o run.db --steps 0
expect 2 '--steps 3x: expected' capture "$demo" --data "$demo" -o run.db --steps 3x
expect 2 '--data FILE is required' capture "$demo" -o run.db
expect 2 '--output RUN.db is required' capture "$demo" --data "$demo"
expect 2 '--output DIR is required' report run.db
expect 2 '--vary KEY=A,B is required' compare "$demo"
expect 2 '--vary skew=1: unknown key, expected topology or dispatcher' compare "$demo" --vary skew=1
expect 2 '--vary topology: an empty value' compare "$demo" --vary topology
expect 2 '--vary topology=dgx_h100,: an empty value' compare "$demo" --vary topology=dgx_h100,
expect 2 '--step: .*demo.yaml is not a trace' check "$demo" --step 1
expect 2 '-n 3: .*demo.yaml has 4 ranks' capture "$demo" --data "$demo" -o run.db -n 3
nine='--vary topology=a'
nine="$nine $nine $nine"
# shellcheck disable=SC2086 # many arguments
expect 2 '--vary: too many' compare "$demo" $nine $nine $nine

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
broken twice 's/^dispatcher.*/tokens_per_rank: 256/'
expect 3 "twice.yaml:5: .*tokens_per_rank" check twice.yaml
broken kind 's/layers: 2/layers: two/'
expect 3 'kind.yaml:2: .*layers' check kind.yaml
broken huge 's/hidden: 64/hidden: 99999999999999999999/'
expect 3 'huge.yaml:2: .*hidden' check huge.yaml
broken exponent 's/rate: 0.1/rate: 1e999/'
expect 3 'exponent.yaml:6: .*learning_rate' check exponent.yaml
broken tokens 's/rank: 256/rank: 123456789/'
expect 3 'tokens.yaml:4: tokens_per_rank: expected a whole number' check tokens.yaml
broken list 's/rank: 256/rank: [1, 2, 3]/'
expect 3 'list.yaml:4: tokens_per_rank lists 3 numbers' check list.yaml
broken divide 's/parallel: 4/parallel: 3/'
expect 3 'divide.yaml:3: expert_parallel 3 does not divide ranks 4' check divide.yaml
broken dispatcher 's/: alltoall/: altoall/'
expect 3 "dispatcher.yaml: unknown dispatcher 'altoall'.*alltoall" check dispatcher.yaml
broken anchor 's/rank: 256/rank: \&a 256/'
expect 3 'anchor.yaml:4: ' check anchor.yaml

# ---- topologies ----
broken without '/^topology/d'
expect 2 'no topology, expected --topology or one in the scenario' simulate without.yaml
expect 3 "dgx_h10.*dgx_h100" simulate "$demo" --topology dgx_h10
expect 3 'absent.yaml' simulate "$demo" --topology absent.yaml
expect 3 "altoall.*alltoall" compare "$demo" --vary dispatcher=alltoall,altoall
sed 's/3 TB\/s/3 TB/' "$source_dir/topologies/dgx_h100.yaml" > unit.yaml
expect 3 "unit.yaml:[0-9]*: .*memory.*'TB'" simulate "$demo" --topology unit.yaml
sed 's/ 3 TB\/s/ 3/' "$source_dir/topologies/dgx_h100.yaml" > bare.yaml
expect 3 "bare.yaml:[0-9]*: .*memory.*no unit" simulate "$demo" --topology bare.yaml

# ---- trace stores: byte 60 of an SQLite file is its version, byte 68 its program ----
expect 0 'best: ' compare "$demo" --vary topology=dgx_h100,pcie_box -o good.db
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
expect 3 'reports/demo.yaml: no moesim store' trace info "$demo"
expect 3 'reports/demo.yaml: no moesim store' compare "$demo" --vary topology=dgx_h100 -o "$demo"

# ---- output ----
expect 1 'absent/run.db: no folder to write to: No such file' capture "$demo" --data "$demo" -o absent/run.db
expect 3 'empty.yaml: exists and is no trace store' capture "$demo" --data "$demo" -o empty.yaml
expect 3 'absent.txt: cannot be read' capture "$demo" --data absent.txt -o run.db
expect 1 'absent/r.db' compare "$demo" --vary topology=dgx_h100 -o absent/r.db
for sink in /dev/full closed pipe; do
    cases=$((cases + 1))
    rm -f pipe
    mkfifo pipe
    # Both ends open, then only the writing one: writing fails at once.
    exec 3<> pipe 4> pipe 3>&-
    case $sink in
    /dev/full) "$moesim" simulate "$demo" > /dev/full 2> err ;;
    closed) "$moesim" simulate "$demo" >&- 2> err ;;
    pipe) "$moesim" simulate "$demo" >&4 2> err ;;
    esac
    code=$?
    exec 4>&-
    { [ $code -eq 1 ] && grep -q '^moesim simulate: standard output: ' err; } ||
        fail "$sink: exit code $code, $(head -c 300 err)"
done
finish
