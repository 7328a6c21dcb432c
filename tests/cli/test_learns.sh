#!/bin/sh
# The captured model learns: its loss gets below the unigram entropy of the bytes it reads, which is what is
# left to a model that knows how often each byte occurs and nothing of its place. The demo has 200 steps; 60
# are enough.
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }

text=text.txt
for packed in /usr/share/doc/jargon-text/jargon.txt.gz /usr/share/dictd/devil.dict.dz; do
    if [ ! -f "$text" ] && [ -f "$packed" ]; then gzip -dc < "$packed" > "$text"; fi
done
entropy=$(od -An -v -tu1 -w1 "$text" |
    awk '{ n[$1]++; all++ } END { for (b in n) h -= n[b] / all * log(n[b] / all); printf "%.6f", h }')
expect 0 complete capture "$demo" --data "$text" -o run.db --steps 60 --seed 1
expect 0 . trace info run.db --json
loss=$(value last_loss_nats)
echo "loss after 60 steps $loss nats, unigram entropy $entropy nats"
awk "BEGIN { exit !($loss < $entropy && $loss > 0) }" || fail "loss $loss is not below the entropy $entropy"
finish
