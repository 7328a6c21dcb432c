#!/bin/sh
# What check says of real captures by their tensors: the faults of tests/cases/shared_parameters by
# fingerprint, right runs of every layout without an alarm, experts without tokens, one run against another.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }
faults=$source_dir/tests/cases/shared_parameters

# run NAME SCENARIO [ARGUMENT...]: a capture of one step, or of as many as ARGUMENT says, into NAME.db.
run()
{
    name=$1 scenario=$2
    shift 2
    expect 0 '^steps_complete' capture "$scenario" --data "$small" --tensors -o "$name.db" --steps 1 "$@"
}

# errors: the classes of those in the JSON in out, each once.
errors()
{
    sed -n '/"class": /{N;s/.*"class": "\(C[0-9]*\)",.*"severity": "error".*/\1/p;}' out | sort -u
}

# A capture of what check finds wrong is refused, unless it is wanted.
expect 5 'error C3' capture "$faults/experts_undivided.yaml" --data "$small" -o no.db
for file in "$faults"/*.yaml; do
    name=$(basename "$file" .yaml)
    run "$name" "$file" --unchecked --tensors=values
done
# Each store now says that it is of the right scenario: what is found is found in tensors.
for file in "$faults"/*.yaml; do
    name=$(basename "$file" .yaml)
    cases=$((cases + 1))
    [ "$name" = right ] || sqlite3 "$name.db" "ATTACH 'right.db' AS r; UPDATE run
        SET value = (SELECT value FROM r.run WHERE key = 'scenario') WHERE key = 'scenario'"
    "$moesim" check "$name.db" --against right.db --json > out 2> err
    code=$?
    errors > found
    cmp -s found "$file.expected" || fail "$name: found $(paste -sd, found): $(cat out err)"
    want=5
    [ -s "$file.expected" ] || want=0
    [ $code -eq $want ] || fail "$name: exit code $code, expected $want"
done
# Alone, too, but for what only a comparison shows.
for name in experts_broadcast experts_over_everybody local_norm shared_not_summed; do
    "$moesim" check $name.db --json > out
    errors | cmp -s - "$faults/$name.yaml.expected" || fail "$name alone: $(cat out)"
done
"$moesim" check experts_undivided.db --against right.db > out
said='step 0 gradient of layer 1 w2 of expert 0: 4 times that of the other run, and so of experts alone'
grep -q "^error C3 ranks 0-3: $said" out ||
    fail "undivided: $(cat out)"
"$moesim" check experts_over_everybody.db > out
grep -q 'error C4 .* experts 0,2,4,6 have the same gradient' out || fail "over everybody: $(cat out)"
expect 0 'all 176 tensors up to here are the same to the bit' check right.db --against right.db
expect 0 '^  C16 run: ' check right.db

# No alarm on other layouts, dispatchers and capacity rules.
cp "$small" base.yaml
sed 's/expert_parallel: 4/expert_parallel: 2/; s/alltoall/allgather/' "$small" > copies.yaml
sed 's/expert_parallel: 4/expert_parallel: 2, pipeline_parallel: 2, micro_batches: 2/' "$small" \
    > pipeline.yaml
sed 's/expert_parallel: 4/expert_parallel: 2, rank_order: strided/; s/alltoall/gshard/
    $a capacity: {rule: deepspeed, factor: 1.0}' "$small" > padded.yaml
sed '$a overlap_grad_reduce: true\ndtype: float64' "$small" > overlap.yaml
sed 's/expert_parallel: 4/expert_parallel: 2/; $a distributed_optimizer: {}' "$small" > buckets.yaml
tied=$source_dir/tests/cases/tied_embedding
for name in sum_first sum_first_scaled separate_bucket separate_bucket_scaled; do
    cp "$tied/$name.yaml" $name.yaml
done
bucketed='buckets sum_first sum_first_scaled separate_bucket separate_bucket_scaled'
for name in base copies pipeline padded overlap $bucketed; do
    run $name $name.yaml --poison --steps 3 --tensors=values
    expect 0 '^  C16 run: ' check $name.db
done
# Layers are those of the model, whatever its micro-batches.
expect 0 '^layers  *2$' trace info pipeline.db
grep -q '^micro_batches  *2$' out || fail "micro-batches: $(cat out)"
# Gradients that are summed in buckets are not kept, and not compared.
for name in $bucketed; do
    rows=$(sqlite3 $name.db "SELECT COUNT(*) FROM tensor WHERE role IN ('gradient', 'clipped')")
    expect 0 "^  run: $rows of [0-9]* rows are of gradients in buckets, which were not kept" check $name.db
done
expect 0 '^no errors' check base.db
grep -q buckets out && fail "nothing lies in a bucket: $(cat out)"
expect 0 '"bucketed": 0,' check base.db --json
# Copies that differ by rounding are no error, and are not said to be the same.
cp base.db rounded.db
sqlite3 rounded.db "UPDATE tensor SET hash = 1, sum_squares = (1 + 1e-7) * sum_squares
    WHERE step = 1 AND role = 'gradient' AND name = 'router' AND rank = 0"
expect 0 '^possible C4 .* by no more than rounding' check rounded.db
grep -q '^  C6 run: ' out || fail "rounded: $(cat out)"
grep -q '^  C16 run: ' out && fail "rounded, and the same to the bit: $(cat out)"
# Rows that somebody deleted.
sqlite3 rounded.db "DELETE FROM tensor WHERE step = 2 AND role = 'gradient' AND name = 'router' AND rank = 0"
"$moesim" check rounded.db > out
[ $? -eq 5 ] && grep -q '^error C6 ranks 0: step 2 .* no row of its gradient on rank 0' out ||
    fail "a row is missing: $(cat out)"
# Of what is not there nothing is said; a rank that the run has not had is no rank.
cp base.db holes.db
sqlite3 holes.db 'DELETE FROM tensor WHERE step = 1 AND rank = 2'
expect 0 '^  run: rows of some rank or step are missing' check holes.db
grep -q '^  C[0-9]* run: ' out && fail "rows are missing, and something is said of them: $(cat out)"
expect 0 '"seen": \[\]' check holes.db --json
sqlite3 holes.db 'UPDATE tensor SET rank = 77 WHERE step = 2 AND rank = 3'
expect 3 'holes.db: tensor .* of rank 77 in step 2, expected a rank from 0 to 3$' check holes.db
said='note C9 .* in this stage [1-9][0-9]* differ, 0 of them by more than rounding'
expect 0 "$said" check copies.db --against base.db
first='step 0 gradient of last_gain: the first that differs, on rank 0, by up to'
"$moesim" check padded.db --against base.db > out
[ $? -eq 5 ] && grep -q "^error C9 .*$first" out ||
    fail "dropped rows: $(cat out)"
# Each copy is compared: gradients divided by the tokens of their rank are right on ranks 0 and 3.
sed 's/heads: 2, sequence: 16/heads: 0/
    s/^tokens_per_rank: .*/tokens_per_rank: [16, 8, 24, 16]\nclip_norm: 0/' \
    "$small" > ours.yaml
sed '$a gradient_sync: [{do: sum, of: shared, over: dp}, {do: divide, of: shared, by: [tokens, dp]}, \
    {do: divide, of: experts, by: world_tokens}, {do: update}]' ours.yaml > local.yaml
for name in ours local; do run $name $name.yaml --unchecked; done
"$moesim" check ours.db --against local.db > out
[ $? -eq 5 ] && grep -q '^error C9 ranks 1-2: step 0 gradient of .* that differs, on rank 1, ' out ||
    fail "copies of other ranks: $(cat out)"
# Runs of other batches are no runs to compare; on other ranks the same batches are.
other_batches() # NAME SED_EXPRESSION WHAT
{
    sed "$2" "$small" > $1.yaml
    expect 0 . capture $1.yaml --data "$small" -o $1.db --steps 1 --tensors
    expect 3 "^moesim check: $1.db: $3, expected the same batches\$" check base.db --against $1.db
}
# Other models are not compared either; what else differs is said beside what it led to.
sed 's/hidden: 16/hidden: 32/' "$small" > hidden.yaml
echo 'dtype: bfloat16' | cat "$small" - > dtype.yaml
for name in hidden dtype; do run $name $name.yaml; done
expect 3 '^moesim check: hidden.db: hidden 32, base.db has 16, expected the same model$' \
    check base.db --against hidden.db
expect 3 '^moesim check: dtype.db: dtype bfloat16, base.db has float32, expected the same model$' \
    check base.db --against dtype.db
printf 'optimizer: sgd\naux_loss: 0.5\n' | cat "$small" - > keys.yaml
run keys keys.yaml
"$moesim" check base.db --against keys.db > out
code=$?
differ='; the scenarios differ in optimizer (adamw, other run sgd), aux_loss (absent, other run 0.5)$'
[ $code -eq 5 ] && grep -q "^error C9 .*$differ" out || fail "other keys: $(cat out)"
alone='s/ranks: 4, expert_parallel: 4/ranks: 2, expert_parallel: 2/'
other_batches fewer "$alone" '64 tokens a micro-batch on 2 ranks, base.db has 128 on 4'
other_batches short 's/sequence: 16/sequence: 8/' '8 tokens a sequence on 4 ranks, base.db has 16 on 4'
other_batches twice 's/ranks: 4,/ranks: 4, micro_batches: 2,/' \
    '2 micro-batches a step on 4 ranks, base.db has 1 on 4'
other_batches uneven 's/tokens_per_rank: .*/tokens_per_rank: [40, 24, 32, 32]/' \
    '8 tokens in sequence 2, base.db has 16'
sed "$alone; s/tokens_per_rank: .*/tokens_per_rank: [96, 32]/" "$small" > wide.yaml
run wide wide.yaml --steps 3
expect 0 "$said" check wide.db --against base.db

# Text of one letter sends every token to the same experts: 2 of 8 have rows, and the gradients of 6 are zero,
# w1 and w2 in each layer.
head -c 3000 /dev/zero | tr '\0' a > letter
for poison in '' --poison; do
    expect 0 . capture base.yaml --data letter --tensors $poison -o letter.db --steps 2
    expect 0 '^  C6 run: ' check letter.db
    for step in 0 1; do
        zero=$(sqlite3 letter.db "SELECT COUNT(*) FROM tensor WHERE step = $step AND role = 'gradient'
            AND expert >= 0 AND presence = 'zero'")
        [ "$zero" -eq 24 ] || fail "step $step $poison: $zero gradients are zero, expected 24"
    done
done

# A run that somebody changed, and what cannot be compared.
sqlite3 letter.db "UPDATE tensor SET presence = 'uninitialised', n_nonfinite = n
    WHERE step = 1 AND role = 'gradient' AND expert >= 0 AND presence = 'zero'"
"$moesim" check letter.db > out
[ $? -eq 5 ] && [ "$(grep -c '^error C6 .* its expert had 0 tokens in this step;' out)" -eq 2 ] ||
    fail "uninitialised: $(cat out)"
expect 3 'letter.db: data_hash is ' check letter.db --against base.db
expect 0 . capture base.yaml --data "$small" -o plain.db --steps 1
expect 0 '^no errors' check plain.db
expect 3 'plain.db: no tensors, expected a capture with --tensors' check base.db --against plain.db
expect 3 'plain.db: no tensors, expected a capture with --tensors' check plain.db --against base.db
expect 2 '--against: base.yaml is not a trace' check base.yaml --against base.db
expect 2 '--against: not with --stress' check base.yaml --against base.db --stress
expect 2 'tensors=all: expected values, or no value' capture base.yaml --tensors=all
# What a capture left that was killed.
cp base.db killed.db.rank0
expect 3 'killed.db: not there, but files of its ranks are; run moesim trace merge killed.db$' check killed.db
expect 3 'killed.db.rank0: the file of one rank; run moesim trace merge killed.db$' check killed.db.rank0
expect 3 'run moesim trace merge killed.db$' check base.db --against killed.db
# Two dispatchers, and a rank with few rows in step 1: the gradient of the router is the first that differs,
# in its last bits; weighed in one place nothing does.
starved=$source_dir/tests/cases/starved_rank
for way in home allgather expert; do
    expect 0 . capture "$starved/$way.yaml" --data "$small" -o $way.db --steps 2 --tensors=values
done
first='^note C9 ranks 0-3: step 1 gradient of layer 0 router: the first that differs, on rank 0, by'
expect 0 "$first" check home.db --against allgather.db
same='^note C9 .*: all [0-9]* tensors up to here are the same to the bit'
expect 0 "$same" check expert.db --against allgather.db
# Experts whose copies all have no row: whether they skip their sums changes no bit.
rows='[64, 64, 0, 0, 0, 0, 0, 0]'
layer="[$rows, $rows, $rows, $rows]"
for way in run skip_weights; do
    sed "s/tokens_per_rank: .*/tokens_per_rank: 64/
        s/^routing: .*/routing: {counts: [$layer, $layer], step: 0}\nempty_rank: $way/" \
        copies.yaml > $way.yaml
    expect 0 . capture $way.yaml --data "$small" --poison -o $way.db --steps 1 --tensors=values
done
expect 0 "$same" check skip_weights.db --against run.db
# What bfloat16 rounds away: the same runs in it have the same bits.
for way in home allgather; do
    sed '$a dtype: bfloat16' "$starved/$way.yaml" > $way.yaml
    expect 0 . capture $way.yaml --data "$small" -o $way.db --steps 2 --tensors=values
done
expect 0 "$same" check home.db --against allgather.db
finish
