#!/bin/sh
# Runs a job that must end with an exit code after N ranks have each printed a line that ends in "right".
# Usage: ends.sh EXIT_CODE N COMMAND...
expected=$1 ranks=$2
shift 2
said=$("$@" 2>&1 </dev/null)
code=$?
right=$(echo "$said" | grep -c ' right$')
[ "$code" -eq "$expected" ] && [ "$right" -eq "$ranks" ] && exit 0
echo "$said"
echo "exit code $code, expected $expected; $right of $ranks ranks are right"
exit 1
