#!/bin/sh
# What must pass before a change lands: all tests of a release and of a sanitized build. Ends with
# "N passed, N failed, N skipped" over all builds, above it why each skipped test was skipped; with CI=true
# only tests that need a GPU may be. Usage: run.sh [PRESET...]
set -u
cd "$(dirname "$0")/.." || exit
[ $# -gt 0 ] || set -- release asan
./setup.sh --tests || exit

for preset; do
    results=$PWD/build/$preset/results.xml
    echo "== $preset"
    mkdir -p "build/$preset"
    rm -f "$results"
    cmake --preset "$preset" && cmake --build --preset "$preset" &&
        ctest --preset "$preset" --output-junit "$results"
    [ -f "$results" ] || echo '<testcase name="build" status="fail"></testcase>' > "$results"
done

echo "== all"
for preset; do echo "build/$preset/results.xml"; done | xargs awk -v ci="${CI:-}" '
    /<testcase / {
        match($0, / name="[^"]*/)
        name = substr($0, RSTART + 7, RLENGTH - 7) " in " FILENAME
        match($0, / status="[^"]*/)
        status = substr($0, RSTART + 9, RLENGTH - 9)
        reason = "no reason given"
    }
    /<skipped message="SKIP_RETURN_CODE/ { status = "skip" }
    match($0, /skip: [^<]*/) { reason = substr($0, RSTART + 6, RLENGTH - 6) }
    /<\/testcase>/ {
        if (status == "skip") print "skipped: " name ": " reason
        if (status == "skip" && ci == "true" && reason !~ /^no GPU/) status = "skip that CI does not allow"
        if (status != "skip" && status != "run") print "failed: " name ": " status
        count[status == "run" ? "passed" : status == "skip" ? "skipped" : "failed"]++
    }
    END {
        printf "%d passed, %d failed, %d skipped\n", count["passed"], count["failed"], count["skipped"]
        exit count["failed"] > 0 || count["passed"] == 0
    }' || exit 1
