#!/bin/sh
# The main job in one command: build, train a small MoE GPT on 4 real ranks, check it, calibrate on it,
# predict the steps of another, replay its routing on three machines in six ways, report.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/demo-out
data=
steps=200
usage='usage: demo.sh [--data FILE] [--steps N] [-o DIR]
Without --data it trains on the text of a Debian package, without -o it writes to demo-out.
N is 200; 5 or more, as calibrate needs.'

wrong()
{
    printf 'demo.sh: %s\n%s\n' "$1" "$usage" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case "$1:${2:-}" in
    --help:* | -h:*)
        printf '%s\n' "$usage"
        exit 0
        ;;
    --data:?*) data=$2 ;;
    --steps:?*) steps=$2 ;;
    -o:?*) out=$2 ;;
    *) wrong "unexpected $1, or nothing after it" ;;
    esac
    shift 2
done
case $steps in
*[!0-9]* | [0-4] | 0* | ???????*) wrong "--steps $steps: expected a whole number from 5 to 999999" ;;
esac
[ -z "$data" ] || { [ -f "$data" ] && [ -r "$data" ]; } || wrong "--data $data: not a file that can be read"

step() { printf '\n== %s\n' "$*"; }

# An interrupted run leaves no page of another one.
mkdir -p "$out"
rm -f "$out/index.html" "$out"/run.db* "$out"/unseen.db*

step "packages and build"
"$root/setup.sh"
{ cmake -S "$root" -B "$root/build/demo" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOESIM_TESTS=OFF &&
    cmake --build "$root/build/demo"; } >"$out/build.log" 2>&1 || {
    tail -n 20 "$out/build.log" >&2
    exit 1
}
PATH=$root/build/demo:$PATH

if [ -z "$data" ]; then
    # Images without documentation have the second one only.
    for packed in /usr/share/doc/jargon-text/jargon.txt.gz /usr/share/dictd/devil.dict.dz; do
        if [ -z "$data" ] && [ -f "$packed" ]; then
            data=$out/text.txt
            gzip -dc <"$packed" >"$data"
        fi
    done
    [ -n "$data" ] || {
        echo "demo.sh: neither jargon-text nor dict-devil left a text here; name one with --data FILE" >&2
        exit 4
    }
fi

step "capture: 4 ranks train for $steps steps on $data"
od -An -v -tu1 -w1 "$data" | awk '
    { n[$1]++ }
    END {
        for (byte in n) nats -= n[byte] / NR * log(n[byte] / NR)
        printf "%d bytes; who knows how often each occurs, and no more, needs %.3f nats a byte\n", NR, nats
    }'
moesim capture -o "$out/run.db" "$root/reports/demo.yaml" --data "$data" --steps "$steps" >/dev/null
moesim trace info "$out/run.db"
step "check"
moesim check "$out/run.db"
step "calibrate: this host, fitted to the capture"
moesim calibrate "$out/run.db" -o "$out/this_host.yaml"
step "validate: the steps of another capture, with another seed, which the fit never saw"
moesim capture -o "$out/unseen.db" "$root/reports/demo.yaml" --data "$data" --seed 2 \
    --steps $((steps < 40 ? steps : 40)) >/dev/null
moesim validate "$out/unseen.db" --topology "$out/this_host.yaml" -o "$out/validate.csv"
step "compare: the captured routing, 3 machines x 2 dispatchers x 3 capacity factors"
moesim compare "$out/run.db" --vary topology=dgx_h100,gb200_nvl72,pcie_box \
    --vary dispatcher=alltoall,allgather --vary capacity=dropless,1.0,1.25 -o "$out/run.db"
step "report"
moesim report "$out/run.db" --validate "$out/validate.csv" -o "$out"
echo "page: $out/index.html"
