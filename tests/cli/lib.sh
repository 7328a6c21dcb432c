# lib.sh - what the tests of the command share; read by them, with the moesim binary as their first argument.
set -u
moesim=$1
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
small=$source_dir/tests/cli/small.yaml
demo=$source_dir/reports/demo.yaml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
cases=0
bad=0

fail()
{
    echo "case $cases: $*"
    bad=1
}

# expect CODE PATTERN ARGUMENT...: moesim exits with CODE and a line it wrote matches PATTERN (a basic regular
# expression): of the results, out, with code 0, else of err, which is then one line, beginning "moesim".
expect()
{
    want=$1 pattern=$2
    shift 2
    cases=$((cases + 1))
    "$moesim" "$@" > out 2> err
    code=$?
    [ $code -eq "$want" ] || fail "moesim $*: exit code $code, expected $want: $(head -c 300 err)"
    if [ "$want" -eq 0 ]; then
        grep -q -e "$pattern" out || fail "moesim $*: no result like '$pattern': $(head -c 300 out)"
        [ ! -s err ] || fail "moesim $*: says on standard error: $(head -c 300 err)"
    else
        grep -q -e "$pattern" err || fail "moesim $*: no error like '$pattern': $(head -c 300 err)"
        { [ "$(wc -l < err)" -eq 1 ] && grep -q '^moesim' err; } ||
            fail "moesim $*: not one line: $(head -c 900 err)"
        [ ! -s out ] || fail "moesim $*: an error, but also results: $(head -c 300 out)"
    fi
}

# same ARGUMENT...: two runs write the same bytes.
same()
{
    expect 0 . "$@"
    mv out first
    expect 0 . "$@"
    cmp -s first out || fail "moesim $*: other bytes the second time"
}

# value KEY: of the first line `"KEY": value` in the JSON in out.
value()
{
    sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" out | head -n 1
}

finish()
{
    echo "$cases commands"
    exit $bad
}
