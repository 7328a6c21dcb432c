#!/bin/sh
# Runs each line "$ command" of the ```console blocks of a Markdown file, at the top of the project with
# moesim's folder in PATH, and compares what it prints with the lines below it. Usage: golden.sh MOESIM FILE;
# with MOE_BLESS=1 it rewrites FILE.
set -eu
cd "$(dirname "$0")/.."
PATH=$(dirname "$1"):$PATH
new=$(mktemp)
trap 'rm -f "$new"' EXIT

inside=
while IFS= read -r line; do
    case "$inside$line" in
    '```console') inside='>' ;;
    '>```') inside= ;;
    '>$ '*)
        printf '%s\n' "$line"
        sh -c "${line#??}" 2>&1 </dev/null || true # what it prints says what failed
        continue
        ;;
    '>'*) continue ;;
    esac
    printf '%s\n' "$line"
done <"$2" >"$new"
cmp -s "$2" "$new" || [ -z "${MOE_BLESS:-}" ] || cat "$new" >"$2"
diff -u "$2" "$new"
