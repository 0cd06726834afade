#!/usr/bin/env bash
# Train until it is done, whatever happens on the way: rounds of RANKS processes, each judged after its end.
#
#   bash bash_train_multi_nodes.sh --config Config/config_om.yaml [--set key=value ...] [--fresh]
#
# RANKS=n           processes to start (default: one for each device that torch sees, 1 without)
# PYTHON=path       the interpreter (default: .venv/bin/python, else python3)
# MASTER_ADDR, MASTER_PORT   where the ranks meet (default: this host, a free port for each round)
#
# A round ends with 0 (done), 42 (planned restart), 43 (stop: a person is needed) or anything else (a death: the next
# round continues from the newest checkpoint that verifies). Pauses, rounds and time limits are keys of the config
# (run.round_seconds, run.max_rounds, run.pause_*). TERM, USR1 or Ctrl-C: save, leave, and do not start again.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 43

# ---------------------------------------------------------------------------------------------------------------------
# One round, inside `timeout`: start the ranks; after the first has ended, do not wait for the others for ever.
# ---------------------------------------------------------------------------------------------------------------------

note_exit() {  # rank, exit code, extra JSON: the last line of the rank's log, next to what it said itself
    printf '{"event": "exit", "attempt": %s, "rank": %s, "code": %s, "time": %s%s}\n' \
        "$OMNIMORPH_ATTEMPT" "$1" "$2" "$(date +%s.%N)" "${3:-}" >> "$OMNIMORPH_RUN/rank$1.jsonl"
}

run_ranks() {
    local -a pids=()
    local rank code patience first="" until="" spoken="" left=$RANKS began=$SECONDS
    touch "$OMNIMORPH_RUN/.launched"
    trap ':' TERM USR1 INT  # the ranks get these too; they save and leave, and are waited for
    for ((rank = 0; rank < RANKS; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS "$PYTHON" OM_train_3modes.py "$@" &
        pids[rank]=$!
    done
    while ((left > 0)); do
        sleep 0.1 & wait $!
        for rank in "${!pids[@]}"; do
            kill -0 "${pids[rank]}" 2> /dev/null && continue
            wait "${pids[rank]}"
            code=$?
            note_exit "$rank" "$code"
            unset "pids[rank]"
            left=$((left - 1))
            # The first bad end names the cause; until then any end.
            if [[ -z $first || $first == 0 || $first == 42 ]]; then first=$code; fi
            # Last words take seconds; after a good end the others may still be finishing theirs.
            patience=$GRACE
            [[ $code == 0 || $code == 42 ]] && patience=$LINGER
            [[ -n $until ]] || until=$((SECONDS + patience))
        done
        if [[ -z $spoken ]]; then  # until a rank has started its log, nobody but the launcher watches
            spoken=$(find "$OMNIMORPH_RUN" -maxdepth 1 -name 'rank*.jsonl' -newer "$OMNIMORPH_RUN/.launched")
            [[ -z $spoken ]] && ((SECONDS - began > START_SECONDS)) && until=$began
        fi
        if [[ -n $until ]] && ((left > 0 && SECONDS > until)); then
            for rank in "${!pids[@]}"; do
                kill -KILL "${pids[rank]}" 2> /dev/null
                wait "${pids[rank]}"
                note_exit "$rank" $? ', "by_launcher": true'
            done
            if [[ $first == 0 || $first == 42 ]]; then first=1; fi
            break
        fi
    done
    return "${first:-1}"
}

if [[ ${1:-} == --round ]]; then
    shift
    run_ranks "$@"
    exit
fi

# ---------------------------------------------------------------------------------------------------------------------
# The restart loop
# ---------------------------------------------------------------------------------------------------------------------

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHON
[[ $# -eq 0 ]] && set -- --config Config/config_om.yaml
ulimit -c 0
ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
if [[ -z ${RANKS:-} ]]; then
    RANKS=$("$PYTHON" -c 'import torch; print(max(torch.accelerator.device_count(), 1))') || exit 43
fi
cores=$(($(nproc) / RANKS))
export RANKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
fixed_port=${MASTER_PORT:-}
unset OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_ATTEMPT OMNIMORPH_ROUND OMNIMORPH_STEP_BACK
mkdir -p Logs
log=Logs/train_multi_${SLURM_JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}.out
exec > >(tee -a "$log") 2>&1
echo "$(date '+%F %T') $RANKS ranks on $(hostname), $OMP_NUM_THREADS threads each, log $log"

leaving=""
child=""
leave() {
    leaving=$1
    [[ -n $child ]] && kill -TERM "$child" 2> /dev/null
}
trap 'leave TERM' TERM
trap 'leave USR1' USR1
trap 'leave INT' INT

finish() {
    [[ -n ${OMNIMORPH_TOKEN:-} ]] && "$PYTHON" -m Runtime.attempts unlock
    echo "$(date '+%F %T') $2"
    exit "$1"
}

arguments=("$@")
for ((round = 0; ; round++)); do
    if ! variables=$("$PYTHON" -m Runtime.attempts begin "${arguments[@]}" --launcher-pid $$ --ranks "$RANKS"); then
        finish 43 "stopped before round $round: see the error above"
    fi
    set -a  # export them all
    eval "$variables"
    set +a
    export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
    MASTER_PORT=${fixed_port:-$FREE_PORT}
    export MASTER_PORT
    # A healthy round saves and leaves before its time limit, so that the limit only ends hung ones.
    reserve=$(awk -v s="$ROUND_SECONDS" 'BEGIN { r = s / 10; print (r > 300 ? s - 300 : s - r) }')
    timeout --kill-after="$LEAVE_SECONDS" "$ROUND_SECONDS" \
        bash "$0" --round "${arguments[@]}" --max-seconds-before-restart "$reserve" &
    child=$!
    while wait "$child"; code=$?; kill -0 "$child" 2> /dev/null; do :; done  # a trapped signal ends `wait` early
    child=""
    "$PYTHON" -m Runtime.attempts end "$code"
    decision=$?
    case $decision in
        0) finish 0 "done after $((round + 1)) rounds" ;;
        43) finish 43 "stopped after $((round + 1)) rounds; verdict in $OMNIMORPH_RUN/verdict.json" ;;
        42) pause=$PAUSE_PLANNED ;;
        *) pause=$PAUSE_CRASH ;;
    esac
    [[ -n $leaving ]] && finish 42 "left by $leaving; the same command continues the run"
    ((round + 1 >= MAX_ROUNDS)) && finish 43 "stopped after $MAX_ROUNDS rounds (run.max_rounds)"
    sleep "$pause" & wait $!
    [[ -n $leaving ]] && finish 42 "left by $leaving; the same command continues the run"
done
