#!/bin/sh
# moesim calibrate and validate on measured collectives. What is "measured" here is what a machine with known
# numbers predicts, so the fit must find these again; real measurements are tests/bench/accuracy.sh's.
. "$(dirname "$0")/lib.sh"
machines=$source_dir/topologies

# rows TYPE...: every collective of 2, 4 and 8 GPUs, 512 B to 512 MiB, each time 1 us.
rows()
{
    echo op,dtype,num_gpus,size_bytes,time_us
    for op in alltoall all_gather reduce_scatter all_reduce; do
        for type; do
            for gpus in 2 4 8; do
                bytes=512
                while [ $bytes -le 536870912 ]; do
                    echo $op,$type,$gpus,$bytes,1
                    bytes=$((4 * bytes))
                done
            done
        done
    done
}
# measured TOPOLOGY: rows.csv with the times that it predicts.
measured()
{
    expect 0 . validate rows.csv --topology "$1" -o predicted.csv
    echo op,dtype,num_gpus,size_bytes,time_us
    sed 1d predicted.csv | cut -d, -f2-6
}
# numbers FILE: the fitted ones, a line "key value" each.
numbers()
{
    sed -n '/^nccl:/,/^  source/s/^  \([a-z0-9_]*\): \([0-9.e+-]*\) \(us\|GB\/s\)$/\1 \2/p' "$1" |
        grep -v '^ring_channel \|^ll128_most '
}
# near FILE FILE PCT: the same numbers within PCT.
near()
{
    numbers "$1" > one && numbers "$2" > two
    [ "$(wc -l < one)" -eq 12 ] || fail "numbers of $1: $(cat one)"
    paste -d' ' one two | awk -v most="$3" '
        $1 != $3 || $2 / $4 > 1 + most / 100 || $4 / $2 > 1 + most / 100 {print; bad = 1} END {exit bad}' ||
        fail "$1 and $2 are not within $3 %"
}

rows half int8 > rows.csv
measured h100_sxm > h100.csv
# Every row is predicted, with the interval of the topology: exp of its percentage.
[ "$(wc -l < predicted.csv)" -eq "$(wc -l < rows.csv)" ] || fail "$(wc -l predicted.csv)"
head -n 1 predicted.csv | grep -qx 'machine,op,dtype,num_gpus,size_bytes,predicted_us,low_us,high_us' ||
    fail "$(head -n 1 predicted.csv)"
pct=$(sed -n 's/^  p2p_large: \(.*\) %/\1/p' "$machines/h100_sxm.yaml")
awk -F, -v e="$pct" '$2 == "alltoall" && $5 > 2e6 {
    n++; if ($8 / $6 - exp(e / 100) > 1e-3 || exp(-e / 100) - $7 / $6 > 1e-3) bad = 1 }
    END {exit bad || !n}' predicted.csv || fail "not +-$pct %: $(grep alltoall predicted.csv | tail -n 1)"

# The fit finds its numbers again, but for how near it holds them to where it starts, and predicts what it did
# not see. Of B200 these rows have no LL128.
expect 0 '^new.yaml: 12 numbers fitted to 143 points of 198 rows (h100.csv, \*@2,4+allgather@8)' \
    calibrate h100.csv --rows '*@2,4+allgather@8' --topology h100_sxm -o new.yaml
near new.yaml "$machines/h100_sxm.yaml" 20
grep -q '^rows of a size left out of the fit: median error 0.[0-9] %' out || fail "$(tail -n 3 out)"
expect 0 . validate h100.csv --topology ./new.yaml --max-error 1
expect 0 '"schema": "moesim.validate_rows/1"' validate h100.csv --topology ./new.yaml --json
"$moesim" validate h100.csv --topology a100_sxm --max-error 10 > out
[ $? -eq 5 ] && grep -q '^failed: ' out || fail "--max-error: $(tail -n 1 out)"
measured b200_sxm > b200.csv
expect 0 '^ll128_channel .* as before: not told without rings for which NCCL takes LL128$' \
    calibrate b200.csv --rows '*@2,4+allgather@8' --topology b200_sxm -o b200.yaml
grep -q '  ll128_channel: 10 GB/s' b200.yaml && tr '\n' ' ' < b200.yaml | tr -s ' ' |
    grep -q 'sim/cost/nccl.h has them: ll128_channel (rings for which NCCL takes LL128 tell it)' ||
    fail "$(tail -n 5 b200.yaml)"

# What is not chosen does not matter, nor does what the base says of an earlier fit; outliers hardly do.
mkdir other
awk -F, -v OFS=, '$3 == 8 && $1 != "allgather" {$5 *= 1.5} {print}' h100.csv > other/h100.csv
expect 0 . calibrate other/h100.csv --rows '*@2,4+allgather@8' --topology ./new.yaml -o again.yaml
cmp -s new.yaml again.yaml || fail "$(diff new.yaml again.yaml)"
same calibrate h100.csv --rows '*@2,4+allgather@8' --topology h100_sxm -o again.yaml --json
awk -F, -v OFS=, 'NR % 17 == 5 {$5 *= 3} {print}' h100.csv > torn.csv
"$moesim" calibrate torn.csv --topology h100_sxm -o torn.yaml > out 2> err || fail "torn.csv: $(cat err)"
grep -qx 'moesim: warning: the rows of 8 points differ by more than 2 times.*' err || fail "$(cat err)"
near torn.yaml "$machines/h100_sxm.yaml" 12

# Repeated rows: the fastest counts, and how far they are apart is said.
{ cat h100.csv && sed 1d h100.csv | awk -F, -v OFS=, '{$5 *= 1.25; print}'; } > twice.csv
expect 0 '^twice.csv, \*@\*, on h100_sxm: 528 rows, 198 points' validate twice.csv --topology h100_sxm
expect 0 '^all  *all .* 25.000$' validate twice.csv --topology h100_sxm --max-error 1
expect 0 '^twice.csv, alltoall@2, on ./new.yaml: 44 rows, 11 points' \
    validate twice.csv --topology ./new.yaml --rows alltoall@2

# The other blocks stay as they are, wherever nccl is.
awk '/^nccl:/ {n = 1} /^inter:/ {n = 0} n' "$machines/h100_sxm.yaml" > block
{ sed -n '/^name:/,/^intra:/p' "$machines/h100_sxm.yaml" | sed '$d' && echo '# before' && cat block &&
    printf '\n# after\n' && sed -n '/^intra:/,/^nccl:/p' "$machines/h100_sxm.yaml" | sed '$d'; } > base.yaml
expect 0 . calibrate h100.csv --topology ./base.yaml -o moved.yaml
awk '/^nccl:/ {n = 1} /^$/ {n = 0} !n' base.yaml > one
awk '/^nccl:/ {n = 1} /^$/ {n = 0} !n' moved.yaml | sed 1d > two
cmp -s one two && grep -q '^# after' two && grep -q '^# before' two || fail "$(diff one two)"
near moved.yaml "$machines/h100_sxm.yaml" 20

# The new file says what it is: not what the base's first line says, and the name that was asked for.
head -n 1 moved.yaml | grep -qx '# h100_sxm, nccl calibrated by moesim calibrate.' ||
    fail "$(head -n 2 moved.yaml)"
expect 0 . calibrate h100.csv --rows alltoall@2,4 --topology h200_sxm -o mine.yaml --name mine
sed '/^nccl/,$d' mine.yaml | grep -q '^#.*NVSwitch' && fail "$(head -n 3 mine.yaml)"
[ "$(sed -n '1d; s/^name: //p' mine.yaml)" = mine ] || fail "$(head -n 3 mine.yaml)"
# This one has no interval of rings: what is inside is of the all-to-alls.
expect 0 '^all  *all .* 100.000 (33) ' validate h100.csv --topology ./mine.yaml
expect 0 '"inside_points": 33' validate h100.csv --topology ./mine.yaml --json
echo '{name: x, gpus_per_node: 8, gpu: {}, nccl: {}}' > flow.yaml
expect 3 'flow.yaml' calibrate h100.csv --topology ./flow.yaml -o flow2.yaml

# All-to-alls of one number of GPUs: a launch and a second block are one number.
rows half | awk -F, -v OFS=, 'NR == 1 || /^alltoall,.*,8,/ {print; $4 *= 2; if (NR > 1) print}' > rows.csv
measured h100_sxm > pairs.csv
expect 0 '^ll_base .* - .* as before: not told apart by these rows: add other numbers of GPUs$' \
    calibrate pairs.csv --topology h100_sxm -o pairs.yaml
expect 0 '^ll_channel .* as before: not told without rings of 16 to 256 KiB$' \
    calibrate pairs.csv --topology h100_sxm -o pairs.yaml
tr '\n' ' ' < pairs.yaml | tr -s ' ' | grep -q 'block (not told apart by these rows: add other ' ||
    fail "$(tail -n 5 pairs.yaml)"

# Means of machines: of one it is that one; the port by what the rings have.
expect 0 '^like.yaml: 12 numbers, means of 2 machines' calibrate h100_sxm h100_sxm --like \
    --topology h100_sxm -o like.yaml
near like.yaml "$machines/h100_sxm.yaml" 0.01
expect 0 '^port .* 729\.[0-9]* ' calibrate h100_sxm --like --topology b200_sxm -o like.yaml
[ "$(grep -c '^  \(p2p\|ring\)_[a-z]*: 40 %$' like.yaml)" -eq 6 ] || fail "no interval: $(tail like.yaml)"
expect 3 'gb200_nvl72: no block nccl' calibrate gb200_nvl72 --like --topology h100_sxm -o like2.yaml

# The numbers that dgx_h100 and hgx_4nic have are those of h100_sxm.
for machine in dgx_h100 hgx_4nic; do
    sed -n '/^nccl:/,$p' "$machines/$machine.yaml" > one
    sed -n '/^nccl:/,$p' "$machines/h100_sxm.yaml" | cmp -s - one || fail "$machine: another block nccl"
done

# NCCL's tuning table of 8 GPUs: all-gathers of LL up to 526 KB, where 12 us + S / 87.4 GB/s is 16.7 us + S /
# 400 GB/s, then Simple. Launch of LL 2 x 12 - 19 = 5 us, a step 1 us; a channel 14/8 x 84 / 24 = 6.125 GB/s.
# It tells what rows of 8 MiB and more do not.
tuning()
{
    sed 's/^/host:10:20 [0] NCCL INFO /' << 'EOF'
Latency/AlgBw | Tree/    LL | Tree/ LL128 | Tree/Simple | Ring/    LL | Ring/ LL128 | Ring/Simple |
    Broadcast |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    8.0/ 70.0|    0.0/  0.0|   11.0/350.0|
       Reduce |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    8.0/ 70.0|    0.0/  0.0|   11.0/350.0|
    AllGather |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|   12.0/ 87.4|    0.0/  0.0|   16.7/400.0|
ReduceScatter |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|   12.0/ 87.4|    0.0/  0.0|   16.7/400.0|
    AllReduce |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|   19.0/ 84.0|    0.0/  0.0|   24.4/200.0|
EOF
}
tuning > nccl.log
{ echo op,num_gpus,size_bytes,time_us && for gpus in 2 4; do
    for mb in 8 16 32 64 128 256 512; do echo all_gather,$gpus,$((mb << 20)),1; done; done; } > rows.csv
measured h100_sxm | tr -d '\r' > large.csv
expect 0 '^ll_channel .* 6.125 .* 41.000 .* prior: NCCL tuning table$' \
    calibrate large.csv --topology h100_sxm -o prior.yaml --tuning nccl.log
grep -qx 'NCCL tuning tables: nccl.log:1, 8 GPUs' out || fail "$(tail -n 3 out)"
grep -q '^ll128_channel .* as before: not told without ' out && grep -q '^ll_base  *5.0.* prior: ' out &&
    grep -q '^simple_base .* fitted$' out || fail "$(cat out)"
tr '\n' ' ' < prior.yaml | tr -s ' ' > one
grep -q 'tuning: >- 8 allreduce ring/ll 19 us 84 GB/s, 8 allreduce ring/simple 24.4 us 200 GB/s, 8 ' one &&
    grep -q "NCCL's tuning tables: nccl.log:1, 8 GPUs\." one &&
    grep -q "as NCCL's table has them: ll_base 28 %, ll_step 48 %, ll_channel 41 %\." one || fail "$(cat one)"
# The topology keeps it: of 8 GPUs 1 KiB takes 5 + 7 us and 8 x 128 B at 6.125 GB/s.
printf 'op,num_gpus,size_bytes,time_us\nallgather,8,1024,12.167\n' > small.csv
expect 0 . validate small.csv --topology ./prior.yaml -o predicted.csv
awk -F, 'NR == 2 && $6 > 12.166 && $6 < 12.168 {n = 1} END {exit !n}' predicted.csv ||
    fail "$(cat predicted.csv)"

# A measured file that holds one counts too; without another, so does the base's; of several the first.
{ tuning && echo '# Collective test starting: all_gather_perf' && echo '# nThread 1 nGpus 2 minBytes 64' &&
    echo '#  Rank  0 Group  0 Pid 1 on a device  0 [0000:04:00] NVIDIA H100 80GB HBM3' &&
    echo '#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong' &&
    awk -F, '$3 == 2 {print $4, $4 / 2, "half none -1", $5, "1 1 0", $5, "1 1 0"}' large.csv &&
    tuning; } > own.log
expect 0 '^NCCL tuning tables: own.log:1, 8 GPUs$' \
    calibrate own.log large.csv --topology h100_sxm -o own.yaml
grep -q '^tuning tables not used: 1 of a number of GPUs that had one; 0 of several nodes' out ||
    fail "$(cat out)"
near own.yaml prior.yaml 0.01
expect 0 "^NCCL tuning tables: the base's$" calibrate large.csv --topology ./own.yaml -o again.yaml
near again.yaml own.yaml 0.01
expect 0 '"tuning": "nccl.log:1, 8 GPUs"' \
    calibrate large.csv --topology h100_sxm -o again.yaml --tuning nccl.log --json
# Rows of all sizes tell these numbers, whatever the table says of 8 GPUs.
awk -F, 'NR == 1 || $3 < 8' h100.csv > fewer.csv
expect 0 . calibrate fewer.csv --topology h100_sxm -o plain.yaml
grep -q 'tuning' plain.yaml && fail "$(grep tuning plain.yaml)"
expect 0 . calibrate fewer.csv --topology h100_sxm -o prior.yaml --tuning nccl.log
grep -q 'prior: ' out && fail "$(grep prior out)"
near plain.yaml prior.yaml 0.001

sed '$d' nccl.log > short.log
expect 3 "short.log:1: NCCL's tuning table is cut short, expected " \
    calibrate h100.csv --topology h100_sxm -o x.yaml --tuning short.log
expect 3 'h100.csv: no tuning table of one node of h100_sxm (0 others), expected lines of NCCL_DEBUG=INFO' \
    calibrate h100.csv --topology h100_sxm -o x.yaml --tuning h100.csv
{ echo 'host:10:20 [0] NCCL INFO comm 0x1 rank 0 nRanks 8 nNodes 2' && cat nccl.log; } > nodes.log
expect 3 'nodes.log: no tuning table of one node of h100_sxm (1 others)' \
    calibrate h100.csv --topology h100_sxm -o x.yaml --tuning nodes.log
expect 3 'absent.log: ' calibrate h100.csv --topology h100_sxm -o x.yaml --tuning absent.log
expect 2 'o ./nccl.log: is what is read' \
    calibrate h100.csv --topology h100_sxm -o ./nccl.log --tuning nccl.log
expect 2 'expected no --rows, --op, --plot or --tuning' \
    calibrate gb200 --like --topology h100_sxm -o x.yaml --tuning nccl.log
expect 2 'no option of measured collectives' calibrate h100.csv -o x.yaml --tuning nccl.log
sed 's/8 allreduce/8 allreduct/' own.yaml > wrong.yaml
expect 3 "wrong.yaml:[0-9]*: tuning: 'allreduct' is no collective, did you mean allreduce" \
    validate small.csv --topology ./wrong.yaml

# A figure, or none and no topology.
expect 0 . calibrate h100.csv --topology h100_sxm -o drawn.yaml --plot fit.svg
grep -q 'allreduce' fit.svg && [ "$(echo fit.svg*)" = fit.svg ] || fail "figure: $(ls)"
printf '#!/bin/sh\nPATH=/nowhere exec "%s" "$@"\n' "$moesim" > poor
chmod +x poor
rich=$moesim
moesim=$work/poor
expect 4 'gnuplot: not found (package gnuplot-nox)' calibrate h100.csv --topology h100_sxm -o none.yaml \
    --plot none.svg
[ "$(echo none*)" = 'none*' ] || fail "no gnuplot: $(ls)"
moesim=$rich

# Rows that nothing can be made of.
expect 2 'without --topology BASE: expected one trace' calibrate h100.csv h100.csv -o x.yaml
expect 3 'h100.csv: not a trace; measured collectives need --topology BASE' calibrate h100.csv -o x.yaml
expect 3 'pcie_box: no block nccl' calibrate h100.csv --topology pcie_box -o x.yaml
expect 2 'o ./h100.csv: is what is read' calibrate rows.csv h100.csv --topology h100_sxm -o ./h100.csv
expect 2 'plot h100.csv: is what is read' calibrate h100.csv --topology h100_sxm -o x.yaml --plot h100.csv
expect 2 "unknown collective 'alltoal'" calibrate h100.csv --topology h100_sxm -o x.yaml --rows alltoal@2
expect 3 'no row left of --rows \*@16' calibrate h100.csv --topology h100_sxm -o x.yaml --rows '*@16'
expect 3 'h100.csv: 11 points on one node' calibrate h100.csv --topology h100_sxm -o x.yaml --rows alltoall@2
sed '/^reduces.*,512,/s/half/hal/' h100.csv > typo.csv
expect 3 "typo.csv:[0-9]*: unknown type 'hal', did you mean half" validate typo.csv --topology h100_sxm
sed '/^alltoall/s/half/e5m2/; s/half/FP16/; 1s/.*/OP,DType,GPUs,Bytes,Time_US/' h100.csv > types.csv
expect 0 '^types.csv, \*@\*, on h100_sxm: 264 rows, 198 points' validate types.csv --topology h100_sxm
awk -F, -v OFS=, '{print $0, NR == 1 ? "machine" : NR < 9 ? "a" : "b"}' h100.csv > two.csv
expect 3 "two.csv:9: machine 'b' beside 'a', expected rows of one" \
    calibrate two.csv --topology h100_sxm -o x.yaml
expect 3 "two.csv:9: machine 'b' beside 'a', expected rows of one" validate two.csv --topology h100_sxm
awk -F, -v OFS=, 'NR > 1 {$5 /= 1000} {print}' h100.csv > ms.csv
expect 3 'ms.csv: nothing to write: .*are the times in us (time_us)' \
    calibrate ms.csv --topology h100_sxm -o x.yaml
expect 2 'cores is of a capture' calibrate h100.csv --topology h100_sxm -o x.yaml --cores 2
expect 2 'like reads topologies, expected no --rows' \
    calibrate gb200 --like --topology h100_sxm -o x.yaml --rows '*@2'
expect 2 'name a b: expected' calibrate h100.csv --topology h100_sxm -o x.yaml --name 'a b'
expect 2 'h100.csv holds no steps: expected --max-error' \
    validate h100.csv --topology h100_sxm --max-step-error 1
printf 'op,num_gpus,nodes,size_bytes,time_us\nalltoall,16,2,65536,90\nalltoall,16,4,65536,90\n' > nodes.csv
expect 0 '^left out: 1 rows of one GPU or of nodes filled otherwise' validate nodes.csv --topology h100_sxm
expect 3 'nodes.csv: 0 points on one node (2 rows left out)' calibrate nodes.csv --topology h100_sxm -o x.yaml
[ ! -e x.yaml ] || fail 'x.yaml is there'
cat > wrong.log << 'EOF'
# Collective test starting: alltoall_perf
# nThread 1 nGpus 2 minBytes 64 maxBytes 128
#  Rank  0 Group  0 Pid 1 on a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
64  16  float  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0
128  32  float  none  -1  12.5  0.1  0.2  9  13.5  0.1  0.2  0
EOF
expect 0 '^left out: 1 rows whose results were wrong' validate wrong.log --topology h100_sxm

# The bench on what is not its own.
bench=$source_dir/tests/bench/accuracy.sh
"$bench" --help | grep -q '^usage: ' || fail 'accuracy.sh --help'
"$bench" "$moesim" --fit 'h100.csv:*@2' --predict 'h100.csv:*@4' > out 2> err
[ $? -eq 2 ] && grep -q 'no topology h100, .*: give --topology T' err || fail "accuracy.sh: $(cat err)"
finish
