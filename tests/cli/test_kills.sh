#!/bin/sh
# Captures that are killed at a random millisecond: a rank, mpirun, or moesim, which mpirun and ranks do not
# outlive. After the merge every step that all ranks committed is there, and no other counts as complete.
# Usage: test_kills.sh MOESIM [KILLS] [SEED]
. "$(dirname "$0")/lib.sh"
command -v mpirun > /dev/null || { echo 'skip: no mpirun' && exit 77; }
kills=${2:-6} seed=${3:-$$}
echo "seed $seed"
children() { cat "/proc/$1/task"/*/children 2> /dev/null; }
ask() { sqlite3 "$1" "$2" 2> /dev/null || echo 0; }

# wait_gone PID...: until these processes have ended
wait_gone()
{
    for gone; do
        for _ in $(seq 300); do
            kill -0 "$gone" 2> /dev/null || continue 2
            sleep 0.1
        done
        fail "process $gone lives on" && kill -9 "$gone"
    done
}

# The steps that all ranks committed, from copies of their files; a reader of the files would tidy them.
committed()
{
    least=1000000
    for rank in 0 1 2 3; do
        rm -f copy.db copy.db-wal
        cp "run.db.rank$rank" copy.db 2> /dev/null
        cp "run.db.rank$rank-wal" copy.db-wal 2> /dev/null
        steps=$(ask copy.db 'SELECT COUNT(*) FROM step')
        [ "$steps" -ge "$least" ] || least=$steps
    done
}

# kill_one VICTIM MS: a capture whose VICTIM (rank, mpirun, moesim) is killed MS after its ranks have started.
# moesim is held meanwhile, so that it merges only after the ranks' files have been looked at.
kill_one()
{
    victim=$1 ms=$2 cases=$((cases + 1))
    rm -f run.db*
    "$moesim" capture "$small" --data "$demo" -o run.db --steps 100000 > out 2> err &
    pid=$!
    launcher='' ranks=''
    for _ in $(seq 3000); do
        launcher=$(children $pid | tr -d ' ')
        ranks=$(children "$launcher")
        [ "$(echo "$ranks" | wc -w)" -lt 4 ] || break
        sleep 0.01
    done
    sleep "$(printf '%d.%03d' $((ms / 1000)) $((ms % 1000)))"
    kill -STOP $pid
    # shellcheck disable=SC2086 # process ids
    case $victim in # without ranks there is a wrong exit code, or no trace
    rank) set -- $ranks && shift $((ms % 4)) && kill -9 "$1" ;;
    mpirun) kill -9 $launcher ;;
    moesim) kill -9 $pid && ranks="$launcher $ranks" ;;
    esac
    # shellcheck disable=SC2086
    wait_gone $ranks
    committed
    kill -CONT $pid 2> /dev/null
    wait $pid
    code=$?
    if [ "$victim" = moesim ]; then
        "$moesim" trace merge run.db > out 2> err
        code=$?
        [ $code -eq 0 ] || [ "$least" -eq 0 ] || fail "$victim after $ms ms: not merged: $(cat err)"
    else
        [ $code -eq 1 ] || fail "$victim after $ms ms: exit code $code"
    fi
    check_merged
}

check_merged()
{
    if [ ! -e run.db ]; then
        [ "$least" -eq 0 ] || fail "$victim after $ms ms: no trace of $least steps: $(tail -n 3 err)"
        return
    fi
    [ "$(ask run.db 'PRAGMA integrity_check')" = ok ] || fail "$victim after $ms ms: a broken trace"
    [ "$(echo run.db*)" = run.db ] || fail "files are left: $(echo run.db*)"
    expect 0 '"complete": false' trace info run.db --json
    [ "$(value steps_complete)" = "$least" ] ||
        fail "$victim after $ms ms: $(value steps_complete) steps, expected $least"
    merged=$((merged + 1)) total=$((total + least))
}

merged=0 total=0 n=0
delays=$(awk -v n="$kills" -v seed="$seed" 'BEGIN { srand(seed); while (n-- > 0) print int(3000 * rand()) }')
for ms in $delays; do
    n=$((n + 1))
    case $((n % 3)) in
    0) kill_one rank "$ms" ;;
    1) kill_one mpirun "$ms" ;;
    2) kill_one moesim "$ms" ;;
    esac
done
echo "$kills kills: $merged traces with $total steps that all ranks committed"
[ "$merged" -gt 0 ] || fail 'every kill came before the first step'
finish
