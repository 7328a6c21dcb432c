#!/bin/sh
# A GPU is asked for where there is none: one line of why and exit code 4; without asking, nothing needs it.
. "$(dirname "$0")/lib.sh"
capture="$(dirname "$moesim")/moesim-capture"
module="$(dirname "$moesim")/libmoesim_cuda.so"
sed 's/ranks: 4, expert_parallel: 4/ranks: 1/' "$small" > one.yaml
sed 's/ranks: 4, expert_parallel: 4/ranks: 2/' "$small" > two.yaml

# refused CODE PATTERN SCENARIO DEVICE: a line of why, and that the capture failed.
refused()
{
    cases=$((cases + 1))
    code=0
    "$moesim" capture "$3" --data "$small" -o run.db --steps 1 --device "$4" > out 2> err || code=$?
    [ $code = "$1" ] && [ ! -s out ] || fail "exit code $code, expected $1: $(cat out err)"
    grep -q "^moesim-capture: $2" err && [ "$(wc -l < err)" = 2 ] || fail "no error like '$2': $(cat err)"
}

expect 2 '^moesim capture: --device cude: unknown, did you mean cuda$' capture one.yaml --data "$small" \
    -o run.db --device cude
expect 0 . capture one.yaml --data "$small" -o run.db --steps 1 --device cpu
rm run.db

export MOESIM_GPU_MODULE="$PWD/none.so"
refused 4 "no GPU part: $PWD/none.so was not built (cmake --preset cuda)\$" one.yaml cuda
echo 'not a library' > none.so
refused 4 'no GPU part: .*none.so: ' one.yaml cuda
MOESIM_GPU_MODULE=$(ldd "$capture" | sed -n 's/.* => \(.*libsqlite3[^ ]*\) .*/\1/p')
refused 4 'no GPU part: .* is of another version of moesim$' one.yaml cuda
! command -v mpirun > /dev/null || refused 4 'ranks 0-1: no GPU part: .* is of another version' two.yaml cuda
[ ! -e run.db ] || fail 'a file is left'
unset MOESIM_GPU_MODULE

{ [ ! -e "$module" ] || command -v nvidia-smi > /dev/null; } && finish
refused 4 '.*no NVIDIA driver' one.yaml cuda
# The same files on a machine without toolkit: all that needs no GPU works, and the rest says why it does not.
{ [ "$(id -u)" = 0 ] && unshare -m true 2> /dev/null; } || finish
toolkit=$(ldd "$module" | sed -n 's|.* => \(.*\)/lib[^/]*/libcudart.*|\1|p')
[ -n "$toolkit" ] || fail "no toolkit in $(ldd "$module")"
cat > hidden.sh << EOF
mount -t tmpfs none '$toolkit' || exit 99
exec "\$@"
EOF
hidden()
{
    unshare -m sh ./hidden.sh "$moesim" capture one.yaml --data "$small" -o run.db --steps 1 --device "$1"
}
hidden cpu > out 2>&1 || fail "without toolkit: $(cat out)"
code=0
hidden cuda > out 2>&1 || code=$?
{ [ $code = 4 ] && grep -q '^moesim-capture: no GPU part: lib[a-z]*\.so' out; } ||
    fail "exit $code without toolkit: $(cat out)"
finish
