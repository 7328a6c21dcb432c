#!/bin/sh
# What can be checked without building: sizes, words, layers (tests/layers.txt), format. Prints each fault as
# "file:line: fault". Usage: lint.sh [FOLDER]; default: this project.
set -eu
LC_ALL=C
export LC_ALL
cd "${1:-$(dirname "$0")/..}"

# What people write: neither data nor LICENSE.
text='\.(c|h|cu|cuh|cc|cpp|hpp|sh|awk|gp|cmake|supp|md|txt|yaml|yml|json)$|^\.ci/run$'
files=$(git ls-files --cached --others --exclude-standard 2>/dev/null | grep -E "$text" |
    while read -r file; do [ ! -f "$file" ] || echo "$file"; done)
if [ -z "$files" ]; then
    echo "skip: not a git checkout, which lists the files to check"
    exit 77
fi
clang-format --version >/dev/null

bad=0
echo "$files" | awk -f tests/lint.awk || bad=1
echo "$files" | grep -E '\.(c|h|cu|cuh|cc|cpp)$' | xargs clang-format --dry-run 2>&1 |
    awk -F: '/ warning: / && !seen[$1]++ { print $1 ":" $2 ": run clang-format -i" } END { exit NR > 0 }' ||
    bad=1
exit $bad
