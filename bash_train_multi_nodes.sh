#!/usr/bin/env bash
#SBATCH --job-name=omnimorph
#SBATCH --nodes=8
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=36:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=Logs/train_multi_%j.out
#
# Train until it is done, whatever happens on the way: rounds of one process per rank, each judged after its end.
#
#   sbatch [--nodes=N --ntasks-per-node=T --account=A ...] bash_train_multi_nodes.sh --config Config/config_om.yaml [...]
#   bash bash_train_multi_nodes.sh --config Config/config_om.yaml [--set key=value ...] [--fresh]
#
# Inside an allocation (sbatch, salloc) the ranks are tasks of srun on all of its nodes, elsewhere processes of this host.
# What follows the script's name goes to OM_train_3modes.py, but for
#   --preflight        only look whether the allocation works (0 = yes, 43 = no); under Slurm this comes first anyway
#   --no-preflight     do without it
#   --allow-tmp        several nodes may write below /tmp, for where that is a shared folder
#
# CLUSTER=name       settings of the site, Config/cluster/<name>.env (default: Slurm's name of the cluster if there is
#                    such a file, else local)
# PYTHON=path        the interpreter (default: .venv/bin/python, else python3)
# RANKS=n            processes on this host, without srun (default: one for each device that torch sees, 1 without)
# MASTER_ADDR, MASTER_PORT   where the ranks meet (default: the first node, a free port for each round)
# PREFLIGHT_SECONDS  limit of the preflight (default 45)
#
# A round ends with 0 (done), 42 (planned restart), 43 (stop: a person is needed) or anything else (a death: the next
# round continues from the newest checkpoint that verifies). Pauses, rounds and time limits are keys of the config
# (run.round_seconds, run.max_rounds, run.pause_*). TERM or Ctrl-C: save, leave, and do not start again. USR1, which
# Slurm sends 300 s before the time limit: the same, and the job goes back into the queue, to continue where it was.
set -u

# Slurm runs a copy of this file from its spool folder.
for folder in "$(dirname "${BASH_SOURCE[0]}")" "$PWD" "${SLURM_SUBMIT_DIR:-}"; do
    [[ -f $folder/OM_train_3modes.py ]] && cd "$folder" && break
done
if [[ ! -f OM_train_3modes.py ]]; then
    echo "error: there is no OM_train_3modes.py in $PWD: submit from the repository's folder, or with --chdir=FOLDER" >&2
    exit 43
fi

# ---------------------------------------------------------------------------------------------------------------------
# What every shell does, that of a rank on its node too
# ---------------------------------------------------------------------------------------------------------------------

load_settings() {  # the site's file, every variable in it exported; NODE_COUNT chooses between its profiles
    set -a
    # shellcheck source=/dev/null
    source "Config/cluster/$CLUSTER.env"
    set +a
    ulimit -c 0  # no core files in the repository
    ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
}

count_oom_kills() {  # how often this node's kernel has ended a process for want of memory
    awk '$1 == "oom_kill" { print $2 }' /proc/vmstat 2> /dev/null
}

note_exit() {  # rank, exit code, extra JSON: the last line of the rank's log, next to what it said itself
    local extra=${3:-} kills
    kills=$(count_oom_kills)
    if [[ $2 == 137 && -n $kills && $kills != "$oom_kills" ]]; then extra+=', "oom_kill": true'; fi
    printf '{"event": "exit", "attempt": %s, "rank": %s, "code": %s, "time": %s%s}\n' \
        "$OMNIMORPH_ATTEMPT" "$1" "$2" "$(date +%s.%N)" "$extra" >> "$OMNIMORPH_RUN/rank$1.jsonl"
}

await() {  # sets `code` to how the process ended; a trapped signal ends `wait` early, with a code of its own
    local again
    while wait "$1"; code=$?; kill -0 "$1" 2> /dev/null; do :; done
    wait "$1" 2> /dev/null
    again=$?
    if [[ $again != 127 ]]; then code=$again; fi
}

run_task() {  # one task of srun: variables of the rank, settings again (a node's profile may differ), the program
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    load_settings
    [[ $1 == Scripts/preflight.py ]] && exec "$PYTHON" "$@"
    local child code oom_kills status awake=9
    oom_kills=$(count_oom_kills)
    trap ':' TERM USR1 INT  # Slurm sends them to the rank too; it saves and leaves, and is waited for
    (trap '' USR1; exec "$PYTHON" "$@") &  # until Python listens, USR1 would end it; it is sent again
    child=$!
    while kill -0 "$child" 2> /dev/null; do  # a stopped rank is woken before it is ended, and knows nothing of it
        status=$(cat "/proc/$child/stat" 2> /dev/null)
        if [[ ${status##*) } == T* ]]; then awake=0; else awake=$((awake + 1)); fi
        sleep 1 &
        wait -n
    done
    await "$child"
    if ((awake < 5)); then note_exit "$RANK" "$code" ', "stopped": true'; else note_exit "$RANK" "$code"; fi
    # --kill-on-bad-exit would end the others in the middle of their leaving.
    [[ $code == 0 || $code == 42 ]] && return 0
    sleep "$GRACE" & wait $!  # and here in the middle of their last words
    return "$code"
}

step() {  # program and arguments: one task of srun for each rank on the chosen nodes; options in srun_options
    local nodes
    nodes=$(tr ' ' , <<< "$NODES")
    exec setsid srun "${srun_options[@]}" --export=ALL --nodes="$NODE_COUNT" --nodelist="$nodes" --ntasks="$RANKS" \
        --ntasks-per-node="$TASKS_PER_NODE" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
        --distribution=block --input=none \
        bash -c "$(declare -f load_settings count_oom_kills note_exit await run_task); run_task \"\$@\"" task "$@"
}

end_steps() {  # no task of an earlier round may be left, whatever became of its srun
    local tries left
    for ((tries = 0; tries < 60; tries++)); do
        left=$(squeue -h -s -j "$SLURM_JOB_ID" -o %i 2> /dev/null | grep -E '\.[0-9]+$')
        [[ -z $left ]] && return
        xargs scancel --signal=KILL <<< "$left" 2> /dev/null
        sleep 1 & wait $!
    done
    echo "$(date '+%F %T') these steps of earlier rounds do not end: $left"
}

# ---------------------------------------------------------------------------------------------------------------------
# One round or one preflight, inside `timeout`. After the first rank has ended, the others are not waited for for ever.
# ---------------------------------------------------------------------------------------------------------------------

has_spoken() {  # whether a rank has begun its log; until then nobody but the launcher watches
    [[ -n $(find "$OMNIMORPH_RUN" -maxdepth 1 -name 'rank*.jsonl' -newer "$OMNIMORPH_RUN/.launched") ]]
}

run_step() {  # the ranks as tasks of srun, which ends the others when one ends badly, and LINGER after a good end
    local srun asked="" next=0 spoken="" began=$SECONDS
    local -a srun_options=(--kill-on-bad-exit=1 --wait="$LINGER")
    touch "$OMNIMORPH_RUN/.launched"
    trap 'asked=1' TERM USR1 INT
    step OM_train_3modes.py "$@" &
    srun=$!
    while kill -0 "$srun" 2> /dev/null; do
        sleep 0.5 & wait $!
        if [[ -z $spoken ]]; then
            if has_spoken; then spoken=1
            elif [[ -n $asked ]]; then  # srun itself may not listen yet, and there is nothing to save
                end_steps
                return 42
            elif ((SECONDS - began > START_SECONDS)); then end_steps
            fi
        fi
        if [[ -n $asked && -n $spoken ]] && ((SECONDS >= next)); then
            kill -USR1 "$srun" 2> /dev/null  # which passes it on; again and again, since a rank may not hear it yet
            next=$((SECONDS + 5))
        fi
    done
    wait "$srun"
}

run_ranks() {  # the ranks as processes of this host
    local -a pids=()
    local rank code patience oom_kills first="" until="" spoken="" left=$RANKS began=$SECONDS
    touch "$OMNIMORPH_RUN/.launched"
    oom_kills=$(count_oom_kills)
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
        if [[ -z $spoken ]]; then
            if has_spoken; then spoken=1
            elif ((SECONDS - began > START_SECONDS)); then until=$began
            fi
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

start_preflight() {  # one task for each rank; what they find goes to standard output
    local -a srun_options=(--kill-on-bad-exit=0) pids=()
    local rank
    [[ -n $UNDER_SLURM ]] && step Scripts/preflight.py --task "$@"  # does not come back
    for ((rank = 0; rank < RANKS; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS "$PYTHON" Scripts/preflight.py --task "$@" &
        pids[rank]=$!
    done
    wait "${pids[@]}"
}

case ${1:-} in  # inside `timeout`, with the variables that the rest of this file has set
    --round)
        shift
        if [[ -n $UNDER_SLURM ]]; then run_step "$@"; else run_ranks "$@"; fi
        exit
        ;;
    --preflight-tasks)
        shift
        start_preflight "$@"
        exit
        ;;
esac

# ---------------------------------------------------------------------------------------------------------------------
# Where we are: options, site, nodes and ranks
# ---------------------------------------------------------------------------------------------------------------------

unset RANK LOCAL_RANK WORLD_SIZE OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_ATTEMPT OMNIMORPH_ROUND OMNIMORPH_STEP_BACK
only_preflight="" arguments=() preflight_options=() want_preflight=""
for word in "$@"; do
    case $word in
        --preflight) only_preflight=1 ;;
        --no-preflight) want_preflight=no ;;
        --allow-tmp) preflight_options+=(--allow-tmp) ;;
        *) arguments+=("$word") ;;
    esac
done
((${#arguments[@]})) || arguments=(--config Config/config_om.yaml)

UNDER_SLURM=""
if [[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} ]] && command -v srun > /dev/null; then UNDER_SLURM=1; fi
export UNDER_SLURM

mkdir -p Logs
log=Logs/train_multi_${SLURM_JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}.out
[[ /dev/stdout -ef $log ]] || exec > >(tee -a "$log")  # under sbatch it is that file already
exec 2>&1

if [[ -z ${CLUSTER:-} ]]; then
    CLUSTER=local
    [[ -f Config/cluster/${SLURM_CLUSTER_NAME:-}.env ]] && CLUSTER=$SLURM_CLUSTER_NAME
fi
if [[ ! -f Config/cluster/$CLUSTER.env ]]; then
    known=$(cd Config/cluster && ls -- *.env)
    echo "error: CLUSTER=$CLUSTER: there is no Config/cluster/$CLUSTER.env; known are ${known//$'\n'/, }"
    exit 43
fi

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
    [[ -n $UNDER_SLURM ]] && end_steps
    [[ -n ${OMNIMORPH_TOKEN:-} ]] && "$PYTHON" -m Runtime.attempts unlock
    echo "$(date '+%F %T') $2"
    if [[ $leaving == USR1 && $1 == 42 && -n $UNDER_SLURM ]]; then
        echo "$(date '+%F %T') the time limit of job $SLURM_JOB_ID is near: back into the queue, to continue from there"
        scontrol requeue "$SLURM_JOB_ID" || echo "it could not be requeued: the same sbatch command continues the run"
    fi
    exit "$1"
}

choose_port() {  # a port that is free on this host, unless rank 0 is on another one or the user has chosen
    MASTER_PORT=${fixed_port:-$1}
    if [[ -z $fixed_port && -n $UNDER_SLURM && ${SLURMD_NODENAME:-} != "${NODES%% *}" ]]; then
        MASTER_PORT=$(srun --export=ALL --nodes=1 --ntasks=1 --nodelist="${NODES%% *}" --input=none \
            "$PYTHON" -m Runtime.attempts port)
    fi
}

choose_nodes() {  # NODES: those of the allocation on which a task can be started and which preflight has not excluded
    local node index code good="" lost=""
    local -a hosts pids=()
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    RANKS_ASKED=$((${#hosts[@]} * TASKS_PER_NODE))
    for index in "${!hosts[@]}"; do  # one node that does not answer would take a whole srun with it
        [[ " $excluded " == *" ${hosts[index]} "* ]] && continue
        timeout --kill-after=5 30 setsid srun --quiet --nodes=1 --ntasks=1 --nodelist="${hosts[index]}" \
            --input=none true &
        pids[index]=$!
    done
    for index in "${!pids[@]}"; do
        node=${hosts[index]}
        await "${pids[index]}"
        if ((code == 0)); then
            good+=" $node"
        else
            lost+=" $node ($(sinfo -h -n "$node" -o %T | head -n 1))"
        fi
    done
    [[ -n $lost ]] && echo "$(date '+%F %T') left out, since no task can be started there:$lost"
    NODES=${good# }
    NODE_COUNT=$(wc -w <<< "$NODES")
    RANKS=$((NODE_COUNT * TASKS_PER_NODE))
    ((NODE_COUNT > 0)) || finish 43 "stopped: no node of the allocation is left"
    MASTER_ADDR=${fixed_address:-${NODES%% *}}
    if [[ -z $fixed_address ]] && ! getent hosts "$MASTER_ADDR" > /dev/null; then  # Slurm knows where its nodes are
        MASTER_ADDR=$(scontrol show node -o "${NODES%% *}" | grep -oE 'NodeAddr=[^ ]+' | cut -d= -f2)
    fi
}

fixed_address=${MASTER_ADDR:-} fixed_port=${MASTER_PORT:-} excluded=""
export CLUSTER NODES NODE_COUNT TASKS_PER_NODE MASTER_ADDR MASTER_PORT
if [[ -n $UNDER_SLURM ]]; then
    if [[ $SLURM_TASKS_PER_NODE == *,* ]]; then
        echo "error: the nodes have different numbers of tasks ($SLURM_TASKS_PER_NODE): submit with --ntasks-per-node"
        exit 43
    fi
    TASKS_PER_NODE=${SLURM_TASKS_PER_NODE%%(*}
    choose_nodes
    cores=${SLURM_CPUS_PER_TASK:-1}
else
    NODES=$(hostname) NODE_COUNT=1
fi
SITE_OPTIONS=()
load_settings
arguments=("${SITE_OPTIONS[@]}" "${arguments[@]}")  # what the user says comes later and counts
export PREFLIGHT_SECONDS=${PREFLIGHT_SECONDS:-45}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
export PYTHON
if [[ -z $UNDER_SLURM ]]; then
    if [[ -z ${RANKS:-} ]]; then
        RANKS=$("$PYTHON" -c 'import torch; print(max(torch.accelerator.device_count(), 1))') || exit 43
    fi
    TASKS_PER_NODE=$RANKS RANKS_ASKED=$RANKS
    MASTER_ADDR=${fixed_address:-127.0.0.1}
    cores=$(($(nproc) / RANKS))
fi
export RANKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

life=${SLURM_RESTART_COUNT:+, start $((SLURM_RESTART_COUNT + 1)) of job $SLURM_JOB_ID}
echo "$(date '+%F %T') $RANKS ranks on $NODES, $OMP_NUM_THREADS threads each, log $log$life"
echo "settings (Config/cluster/$CLUSTER.env and what was set before):"
"$PYTHON" -m Runtime.provenance

# ---------------------------------------------------------------------------------------------------------------------
# Preflight: a misconfigured allocation is found in a minute
# ---------------------------------------------------------------------------------------------------------------------

preflight() {  # leaves in NODES those that work; ends the script where too few do
    local variables code EXCLUDED=""
    while :; do
        choose_port "$("$PYTHON" -m Runtime.attempts port)"
        echo "$(date '+%F %T') preflight of $RANKS ranks on $NODES"
        variables=$(timeout --kill-after=5 "$PREFLIGHT_SECONDS" bash "$0" --preflight-tasks "$@" \
            | "$PYTHON" Scripts/preflight.py --collect "$@")
        code=$?
        [[ -n $UNDER_SLURM ]] && end_steps
        [[ -n $leaving ]] && finish 42 "left by $leaving during the preflight"
        [[ $code == 0 ]] && return
        [[ $code == 75 ]] || finish 43 "stopped: the preflight failed, see the table above"
        eval "$variables"
        excluded+=" $EXCLUDED"
        choose_nodes
    done
}

if [[ -n $only_preflight || (-n $UNDER_SLURM && -z $want_preflight) ]]; then
    preflight "${arguments[@]}" "${preflight_options[@]}"
    [[ -n $only_preflight ]] && finish 0 "the preflight passed"
fi

# ---------------------------------------------------------------------------------------------------------------------
# The restart loop
# ---------------------------------------------------------------------------------------------------------------------

SILENT="vanished|frozen|never started|a rank did not arrive"  # causes after which nodes are looked at again
for ((round = 0; ; round++)); do
    if ! variables=$("$PYTHON" -m Runtime.attempts begin "${arguments[@]}" --launcher-pid $$ --ranks "$RANKS" \
        --of "$RANKS_ASKED"); then
        finish 43 "stopped before round $round: see the error above"
    fi
    set -a  # export them all
    eval "$variables"
    set +a
    choose_port "$FREE_PORT"
    # A healthy round saves and leaves before its time limit, so that the limit only ends hung ones.
    reserve=$(awk -v s="$ROUND_SECONDS" 'BEGIN { r = s / 10; print (r > 300 ? s - 300 : s - r) }')
    timeout --kill-after="$LEAVE_SECONDS" "$ROUND_SECONDS" \
        bash "$0" --round "${arguments[@]}" --max-seconds-before-restart "$reserve" &
    child=$!
    await "$child"
    child=""
    [[ -n $UNDER_SLURM ]] && end_steps
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
    # Ranks that fell silent may have lost their node.
    if [[ -n $UNDER_SLURM && -z $want_preflight && $decision == 1 ]] \
        && grep -qE "\"cause\": \"($SILENT)\"" "$OMNIMORPH_RUN/verdict.json"; then
        choose_nodes
        preflight "${arguments[@]}" "${preflight_options[@]}"
    fi
done
