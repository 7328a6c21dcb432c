#!/bin/sh
# Everything: run.sh, and the same tests built by clang and, where they do not use MPI, with ThreadSanitizer.
exec "$(dirname "$0")/run.sh" release asan clang tsan
