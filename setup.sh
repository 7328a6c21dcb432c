#!/bin/sh
# Installs what is missing of the Debian packages of build and demo; with --tests those of the tests too.
set -eu

build="cmake ninja-build pkg-config gcc libc6-dev libsqlite3-dev libyaml-dev libjansson-dev libopenmpi-dev \
openmpi-bin libopenblas-dev sqlite3 gnuplot-nox fonts-dejavu jargon-text dict-devil"
tests="g++ clang clang-format libcmocka-dev libsimgrid-dev git chromium"

case "$*" in
'') wanted=$build ;;
--tests) wanted="$build $tests" ;;
*)
    echo "usage: setup.sh [--tests]" >&2
    exit 2
    ;;
esac
if ! command -v dpkg-query >/dev/null; then
    echo "setup.sh: this is not Debian; install what these packages hold: $wanted" >&2
    exit 4
fi

# shellcheck disable=SC2086 # lists of packages are split on purpose, here and below
installed=$(dpkg-query -W -f '${Package}:${db:Status-Status}\n' $wanted 2>/dev/null) || true
missing=
for package in $wanted; do
    printf '%s\n' "$installed" | grep -qxF "$package:installed" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "setup.sh: packages are missing; install them with" >&2
    echo "    sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends$missing'" >&2
    exit 4
fi
echo "setup.sh: installing$missing"
$as_root apt-get update -q
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=120 $missing
