#!/bin/sh
# How near predicted collectives are to measured ones: calibrates each machine on some of its rows, predicts
# others that the fit never saw, and in the same way machines from other machines.
# Usage: accuracy.sh [MOESIM] [--csv OUT] [--fit FILE:ROWS --predict FILE:ROWS [--topology T]]...
#
# Without --fit: of $MOESIM_DATA/measured/nccl_MACHINE.csv fits the rows of 2 and 4 GPUs (GB200: 2) and the
# all-gather of 8, predicts all others of 8 (GB200: 4), and runs bench_accuracy where it is built. With it:
# files of the same form, whose machine T (that of the first file's name) says what is known before.
# OUT: every predicted row. Exit code 5 when a floor is missed: medians of absolute errors, all-to-all 6 %
# from 64 KiB on, below 15 % or 1.2 times what half and int8 differ by, sums 10 %; 80 % intervals hold 70 to
# 90 %.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
data=${MOESIM_DATA:-$root/../shared}/measured
moesim=$root/build/release/moesim out='' jobs='' fitted='' code=0
judged=' a100_sxm h100_sxm b200_sxm gb200 '
tab=$(printf '\t')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$work/jobs"

usage='usage: accuracy.sh [MOESIM] [--csv OUT] [--fit FILE:ROWS --predict FILE:ROWS [--topology T]]...'

wrong()
{
    echo "accuracy.sh: $1 ($usage)" >&2
    exit 2
}

# machine_of FILE: as its name says.
machine_of()
{
    basename "$1" .csv | sed 's/^nccl_//'
}

# job FIT PREDICT TOPOLOGY: a line of the list, FILE:ROWS cut at the last colon.
job()
{
    [ -f "${1%:*}" ] && [ -f "${2%:*}" ] || wrong "no file ${1%:*} or ${2%:*}, or no :ROWS behind it"
    printf '%s\t%s\t%s\t%s\t%s\n' "${1%:*}" "${1##*:}" "${2%:*}" "${2##*:}" "$3" >> "$work/jobs"
}

case ${1:-} in -h | --help) echo "$usage" && exit ;; esac
[ $# -eq 0 ] || [ "${1#--}" != "$1" ] || { moesim=$1 && shift; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || wrong "nothing after $1"
    case $1 in
    --csv) out=$2 ;;
    --fit) fitted=$2 ;;
    --predict)
        [ -n "$fitted" ] || wrong '--predict without --fit'
        topology=$(machine_of "${fitted%:*}") predicted=$2
        if [ "${3:-}" = --topology ]; then
            [ $# -ge 4 ] || wrong "nothing after $3"
            topology=$4
            shift 2
        elif [ ! -f "$root/topologies/$topology.yaml" ]; then
            wrong "no topology $topology, which is what ${fitted%:*} is called: give --topology T"
        fi
        job "$fitted" "$predicted" "$topology"
        jobs=given fitted=
        ;;
    *) wrong "unexpected $1" ;;
    esac
    shift 2
done
[ -z "$fitted" ] || wrong '--fit without --predict'
[ -x "$moesim" ] || { echo "accuracy.sh: no $moesim (cmake --build --preset release)" >&2 && exit 4; }
if [ -z "$jobs" ]; then
    for machine in a100_sxm h100_sxm b200_sxm gb200 l40s; do
        file=$data/nccl_$machine.csv most=8 fit='*@2,4+allgather@8'
        [ -f "$file" ] || { echo "accuracy.sh: no $file (MOESIM_DATA names its folder)" >&2 && exit 4; }
        [ $machine != gb200 ] || { most=4 && fit='*@2'; }
        job "$file:$fit" "$file:alltoall@$most+reducescatter@$most+allreduce@$most" $machine
    done
fi

# predict FILE ROWS TOPOLOGY MACHINE: lines of the table, and what goes into OUT, whose collectives are called
# as FILE calls them.
predict()
{
    "$moesim" validate "$1" --rows "$2" --topology "$3" -o "$work/rows.csv" > "$work/table"
    awk -v machine="$4" '{gsub(/ \([0-9]+\)|,/, "")} NF == 7 && $1 != "op" {print machine, $0}' "$work/table"
    awk -F, -v machine="$4" -v OFS=, '
        NR == FNR && /^#/ {next}
        NR == FNR && !c {for (c = 1; c < NF && $c !~ /^"?op"?$/; c++); next}
        NR == FNR {gsub(/"/, "", $c); name = tolower($c); gsub(/[_-]/, "", name); as[name] = $c; next}
        FNR > 1 {print machine, $2 in as ? as[$2] : $2, $3, $4, $5, $6}' "$1" "$work/rows.csv" \
        > "$work/predicted.csv"
}

# Reads lines of predict. Sizes from 64 KiB on and below are what floors are of; with JUDGED it says them.
cat > "$work/table.awk" << 'EOF'
function say(floor, missed) { printf "%10s%s\n", floor, missed ? "  missed" : ""; misses += missed }
BEGIN { printf "%-10s %-13s %-7s %6s %8s %8s %8s %8s %9s\n", "machine", "op", "size", "points", "median_%",
               "p90_%", "inside_%", "repeat_%", judged ? "floor" : "" }
$2 == "all" && $3 != "all" || $2 != "all" && $3 == "all" { next }
{
    printf "%-10s %-13s %-7s %6d %8.1f %8.1f", $1, $2, $3, $4, $5, $6
    printf $7 == "-" ? " %8s" : " %8.0f", $7
    printf $8 == "-" ? " %8s" : " %8.1f", $8
    repeat = $8 == "-" ? 0 : 1.2 * $8
    small = $3 == "<64K"
    if (!index(judged, " " $1 " ")) print ""
    else if ($2 == "all") say("70-90", $7 == "-" || $7 < 70 || $7 > 90)
    else if (!small && $3 != ">=64K") print ""
    else if ($2 == "alltoall") {
        floor = !small ? 6 : repeat > 15 ? repeat : 15
        say(sprintf("%.1f", floor), $5 > floor)
    }
    else if ($2 ~ /^(reducescatter|allreduce)$/) say(10, $5 > 10)
    else print ""
}
END { exit misses > 0 ? 5 : 0 }
EOF

echo 'machine,op,dtype,num_gpus,size_bytes,predicted_us' > "$work/out.csv"
while IFS=$tab read -r file rows predicted chosen topology; do
    machine=$(machine_of "$predicted")
    "$moesim" calibrate "$file" --rows "$rows" --topology "$topology" -o "$work/$machine.yaml"
    echo
    predict "$predicted" "$chosen" "$work/$machine.yaml" "$machine" >> "$work/lines"
    cat "$work/predicted.csv" >> "$work/out.csv"
    grep -v '^#' "$work/$machine.yaml" > "$work/one"
    [ -n "$jobs" ] || grep -v '^#' "$root/topologies/$machine.yaml" | cmp -s - "$work/one" ||
        echo "topologies/$machine.yaml holds another fit"
done < "$work/jobs"
echo 'fitted to other rows of the same machine:'
awk -v judged="$judged" -f "$work/table.awk" "$work/lines" || code=5

# like MACHINE OTHER...: one machine's rows with the numbers of others.
like()
{
    machine=$1 name=$machine others=''
    shift
    for other; do others="$others $work/$other.yaml"; done
    # shellcheck disable=SC2086 # a folder of mktemp and machines' names have no spaces
    "$moesim" calibrate $others --like --topology "$machine" -o "$work/like.yaml" > "$work/calibrated"
    predict "$data/nccl_$machine.csv" '*@*' "$work/like.yaml" "$machine"
}

if [ -z "$jobs" ]; then
    like a100_sxm h100_sxm b200_sxm gb200 > "$work/lines"
    like h100_sxm a100_sxm b200_sxm gb200 >> "$work/lines"
    like b200_sxm a100_sxm h100_sxm gb200 >> "$work/lines"
    like gb200 a100_sxm h100_sxm b200_sxm >> "$work/lines"
    printf '\nnumbers of the other machines, port by its own rings; all rows:\n'
    awk -f "$work/table.awk" "$work/lines"
    like b200_sxm h100_sxm > "$work/lines"
    printf '\nnumbers of H100, port by its own rings; all rows:\n'
    awk -f "$work/table.awk" "$work/lines"
    others=$(dirname "$moesim")/tests/bench_accuracy
    [ ! -x "$others" ] || "$others" --out "$work/out.csv" || code=$?
fi
[ -z "$out" ] || cp "$work/out.csv" "$out"
exit $code
