#!/bin/sh
# Plants faults of every kind in a small project that has this project's rules: lint must name each of them,
# and nothing else.
set -eu
LC_ALL=C
export LC_ALL
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
git init -q .
mkdir -p sim/cli sim/check sim/lower sim/cost traces runtime kernels reports topologies tests/unit expected
cp "$here/../.clang-format" .
cp "$here/lint.awk" "$here/layers.txt" tests/

# plant FILE [FAULT]: appends standard input to the file. FAULT is what lint says of it: "line: fault".
plant()
{
    cat >> "$1"
    [ $# = 1 ] || echo "$1:$2" >> expected/faults
}
repeat() { awk -v n="$1" -v line="$2" 'BEGIN { while (n-- > 0) print line }'; }
include() { printf '#include %s\n' "$1"; }
layers='(tests/layers.txt)'

# Without a fault: what the rules must not mistake for one.
plant sim/lower/lower.c <<'END'
#include "sim/lower/lower.h"

static const struct moe_dispatcher table[] = {
    {"alltoall", moe_alltoall_dispatch},
    {"toy", moe_toy_dispatch},
};
END
plant sim/lower/rules.c <<'END'
#include "sim/lower/lower.h"

static const struct moe_capacity_rule rules[] = {
    {"keeper", moe_keeper_limit},
};
END
plant sim/schedule.h <<'END'
#define MOE_COLLECTIVES(X) X(ALLTOALL, "alltoall")
END
plant sim/check/check.c <<'END'
#include "sim/schedule.h"

/* Neither a toy, nor fork(), nor "alltoall" in a comment,
 * popen(), */ // system()
int moe_time(int kind)
{
    return kind == MOE_ALLTOALL ? ctime("popen()", "toys", "MPI_alltoallv") : '"';
}
END
plant traces/store.c <<'END'
#include <sqlite3.h>
END
plant topologies/good.yaml <<'END'
name: good
gpu: # a comment
  rate: 1 GB/s
  source: a data sheet
END
{ echo 'int f(void)' && echo '{' && repeat 77 '    f();' && echo '}'; } | plant kernels/eighty.c
repeat 600 'int x;' | plant kernels/six_hundred.c
printf '/* %s µ */\n' "$(repeat 102 x | tr -d '\n')" | plant kernels/columns.c
"$here/lint.sh" "$folder"

# The one fault that clang-format finds.
printf 'int  x;\n' | plant kernels/format.c '1: run clang-format -i'
"$here/lint.sh" "$folder" > expected/found && { echo "lint passed a file that is not formatted"; exit 1; }

# Sizes and words.
repeat 601 'int x;' | plant kernels/long_file.c '601: file of 601 lines, at most 600'
{ echo 'int f(void)' && echo '{' && repeat 78 '    f();' && echo '}'; } |
    plant kernels/long_function.c '1: function of 81 lines, at most 80'
{ echo 'f()' && echo '{' && repeat 78 '    f' && echo '}'; } |
    plant tests/long_function.sh '1: function of 81 lines, at most 80'
printf "/* %s */\n" "$(repeat 108 x | tr -d "\n")" | plant sim/schedule.h "2: more than 110 columns"
printf '// %s\n' "$(repeat 108 x | tr -d '\n')" | plant kernels/wide.cu '1: more than 110 columns'
repeat 1 "# $(repeat 109 x | tr -d '\n')" | plant tests/wide.sh '1: more than 110 columns'
printf '/*\t*/\n' | plant kernels/tab.c '1: tab'
printf '# TO%s: x\n' DO | plant notes.md '1: left for later: make it an issue'
printf '# FIX%s x\n' ME | plant tests/fix.sh '1: left for later: make it an issue'
printf '/* XX%s */\n' X | plant kernels/xxx.c '1: left for later: make it an issue'
for top in work home root tmp; do
    printf 'see /%s/here\n' $top | plant $top.md '1: path of one machine'
done
printf 'gpu:\n  rate: 1 GB/s\nnic:\n  source: x\n' | plant topologies/first.yaml '1: block without source:'
printf 'nic:\n  source: x\nlink:\n  source:\n' | plant topologies/last.yaml '3: block without source:'

# Layers: file, include, and what lint says of it.
while read -r file header; do
    name=$(echo "$header" | tr -d '<>"')
    include "$header" | plant "$file" "1: may not include $name $layers"
done <<'END'
sim/check/more.c "sim/scenario.h"
sim/check/gradient.c "sim/lower/lower.h"
sim/simulate.c "sim/lower/builder.h"
sim/simulate.h "sim/check/check.h"
sim/network.c "sim/lower/alltoall.h"
sim/values.c "sim/scenario.h"
sim/schedule.c "sim/lower/builder.h"
sim/scenario.c "runtime/execute.h"
sim/lower/builder.c "kernels/ref.h"
sim/lower/gradient_sync.c "sim/check/check.h"
sim/base.c "sim/schedule.h"
sim/topology.c <runtime/device.h>
sim/yaml.c "base.h"
sim/cli/main.c "runtime/execute.h"
sim/cli/check.c "kernels/ref.h"
reports/report.c "runtime/execute.h"
traces/merge.c "sim/schedule.h"
runtime/execute.c "sim/scenario.h"
runtime/device_cpu.c "sim/lower/lower.h"
kernels/ref.c "sim/base.h"
sim/heap.c <sqlite3.h>
sim/share.c <time.h>
sim/routing.c <sys/time.h>
sim/lower/spawn.c <spawn.h>
sim/lower/wait.c <sys/wait.h>
sim/lower/comm.c <mpi.h>
sim/lower/cuda.c <cuda_runtime.h>
sim/lower/nccl.c <nccl.h>
traces/import.c <sqlite3.h>
runtime/comm_self.c <mpi.h>
runtime/main.c <yaml.h>
END
include '<stdlib.h>' | plant sim/other.c '1: no layer (tests/layers.txt)'
for call in time clock clock_gettime gettimeofday fork execv execvp execl execlp system popen sleep usleep \
    nanosleep getpid rand random srand srandom; do
    echo "int x = $call();" | plant sim/lower/$call.c "1: may not call $call() $layers"
done
echo 'int x = skip();' | plant tests/unit/test_skip.c "1: may not call skip() $layers"

# Names of dispatchers.
only='which only its lowering may know'
echo 'const char *x = "in a toy";' | plant sim/check/string.c "1: names 'toy', $only"
echo 'enum { MOE_TOY };' | plant sim/network_enum.h "1: names 'toy', $only"
echo 'const char *x = "alltoall";' | plant runtime/x.c "1: names 'alltoall', $only"
echo 'const char *x = "keeper";' | plant runtime/rule.c "1: names 'keeper', $only"

sort -o expected/faults expected/faults
"$here/lint.sh" "$folder" > expected/found || true
sort expected/found | diff expected/faults -

# A table that lint cannot read would switch the last check off.
echo 'int x;' > sim/lower/lower.c
rm kernels/format.c
"$here/lint.sh" "$folder" > expected/found && { echo "lint passed all other faults"; exit 1; }
grep -x 'tests/layers.txt:1: no row {"name", ...} in sim/lower/lower.c' expected/found
echo "lint names all $(wc -l < expected/faults) planted faults"
