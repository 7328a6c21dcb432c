#!/bin/sh
# How fast the trace store takes routing, beside a plain file (store.c). Usage: store.sh BUILD_FOLDER
set -eu
cmake --build "$1" --target bench_store > /dev/null
folder=$(mktemp -d "$1/bench.XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$1/tests/bench_store" "$folder"
