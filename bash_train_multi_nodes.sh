#!/usr/bin/env bash
#SBATCH --job-name=omnimorph
#SBATCH --nodes=8
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=36:00:00
#SBATCH --signal=B:USR1@480
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=Logs/train_multi_%j.out
#
# Train until it is done, across crashes: rounds of one process per rank, each judged after its end.
#
#   sbatch [--nodes=N --ntasks-per-node=T --account=A ...] bash_train_multi_nodes.sh --config Config/config_om.yaml [...]
#   bash bash_train_multi_nodes.sh --config Config/config_om.yaml [--set key=value ...] [--fresh]
#
# Inside an allocation (sbatch, salloc) the ranks are srun tasks on all of its nodes, elsewhere processes of this host.
# All arguments go to OM_train_3modes.py, except
#   --help             print this text
#   --dry-run          build everything, print sizes and costs, and exit
#   --preflight        only check whether the allocation works (0 = yes, 43 = no); under Slurm a start begins with it
#   --no-preflight     do not check it
#   --allow-tmp        several nodes may write below /tmp, for sites where that is a shared folder
#
# CLUSTER=name       settings of the site, Config/cluster/<name>.env (default: Slurm's name of the cluster if that file
#                    exists, else local)
# PYTHON=path        the interpreter (default: .venv/bin/python, else python3), or several words that start one, such as
#                    PYTHON="apptainer exec --nv omnimorph.sif python"
# RANKS=n            processes on this host, without srun (default: one for each device that torch sees, 1 without)
# MASTER_ADDR, MASTER_PORT   where the ranks meet (default: the first node, a free port for each round)
# PREFLIGHT_SECONDS  time limit of the preflight (default 45)
#
# A round ends with 0 (done), 42 (planned restart), 43 (stop: a person is needed) or anything else (a death: the next
# round continues from the newest checkpoint that verifies). Pauses, rounds and time limits are keys of the config
# (run.round_seconds, run.max_rounds, run.pause_*). TERM, Ctrl-C or a terminal that is closed: save, leave, and do not
# start again. USR1, which Slurm sends 480 s before the time limit: the same, and the job is requeued and continues from
# there, if it has made a step durable; ranks that hang are killed in time for that. On fewer nodes than at first, a
# step keeps its samples (Runtime/global_batch.py).
#
# Paths are relative to the repository's folder; --config and --init-from may also be relative to the current one.
set -u
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then  # below, an empty array is an unset variable
    echo "error: bash $BASH_VERSION is too old, 4.4 or newer is needed: load a newer one, or start it by its path" >&2
    exit 43
fi

script=$(realpath "${BASH_SOURCE[0]}") typed_in=$PWD
# Slurm runs a copy of this file from its spool folder.
for folder in "$(dirname "${BASH_SOURCE[0]}")" "$PWD" "${SLURM_SUBMIT_DIR:-}"; do
    [[ -f $folder/OM_train_3modes.py ]] && cd "$folder" && break
done
if [[ ! -f OM_train_3modes.py ]]; then
    echo "error: there is no OM_train_3modes.py in $PWD: submit from the repository's folder, or with --chdir=FOLDER" >&2
    exit 43
fi

# ---------------------------------------------------------------------------------------------------------------------
# Functions for every shell, including that of a rank on its node
# ---------------------------------------------------------------------------------------------------------------------

split_python() {  # set INTERPRETER to the words of PYTHON, of which a path with blanks is one
    INTERPRETER=("$PYTHON")
    command -v "$PYTHON" > /dev/null || read -ra INTERPRETER <<< "$PYTHON"
}

load_settings() {  # read the site's file and export all its variables; NODE_COUNT chooses between its profiles
    set -a
    # shellcheck source=/dev/null
    source "Config/cluster/$CLUSTER.env"
    set +a
    ulimit -c 0  # no core files in the repository
    ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
}

count_oom_kills() {  # how many processes this node's kernel has killed because memory ran out
    awk '$1 == "oom_kill" { print $2 }' /proc/vmstat 2> /dev/null
}

note_exit() {  # rank, exit code, extra JSON: append the end of the process to the rank's log
    local extra=${3:-} kills lock=$OMNIMORPH_RUN/lock.json
    # If another launch has taken the folder over, this log is no longer ours.
    [[ -e $lock ]] && ! grep -q "$OMNIMORPH_TOKEN" "$lock" && return
    kills=$(count_oom_kills)
    if [[ $2 == 137 && -n $kills && $kills != "$oom_kills" ]]; then extra+=', "oom_kill": true'; fi
    printf '{"event": "exit", "attempt": %s, "rank": %s, "code": %s, "time": %s%s}\n' \
        "$OMNIMORPH_ATTEMPT" "$1" "$2" "$(date +%s.%N)" "$extra" >> "$OMNIMORPH_RUN/rank$1.jsonl"
}

nap() {  # seconds: sleep, but wake up for a trapped signal
    local sleeper
    sleep "$1" > /dev/null 2>&1 &
    sleeper=$!
    wait "$sleeper" || kill "$sleeper" 2> /dev/null
}

await() {  # pid, seconds: wait and set `code` to its exit code; after the seconds, kill it and set 137 at once
    local ends=$((SECONDS + ${2:-1000000000}))
    while kill -0 "$1" 2> /dev/null; do
        if ((SECONDS >= ends)); then
            kill -KILL "$1" 2> /dev/null
            code=137
            return
        fi
        nap 0.1
    done
    wait "$1"
    code=$?
}

run_task() {  # one task of srun: set the rank's variables, load the settings (a node's profile may differ), run
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    load_settings
    local -a INTERPRETER
    split_python
    [[ $1 == Scripts/preflight/preflight.py ]] && exec "${INTERPRETER[@]}" "$@"
    local child code oom_kills status awake=9
    oom_kills=$(count_oom_kills)
    trap ':' TERM USR1 INT HUP  # Slurm sends them to the rank too, which saves and leaves; wait for it
    # Before Python handles USR1 it would die of it; USR1 is sent repeatedly.
    (trap '' USR1; exec "${INTERPRETER[@]}" "$@") &
    child=$!
    while kill -0 "$child" 2> /dev/null; do  # Slurm wakes a stopped rank before it ends it, so note the stop here
        status=$(cat "/proc/$child/stat" 2> /dev/null)
        if [[ ${status##*) } == T* ]]; then awake=0; else awake=$((awake + 1)); fi
        sleep 1 > /dev/null 2>&1 &
        wait -n
    done
    await "$child"
    if ((awake < 5)); then note_exit "$RANK" "$code" ', "stopped": true'; else note_exit "$RANK" "$code"; fi
    # A code other than 0 makes --kill-on-bad-exit end the other ranks while they are leaving.
    [[ $code == 0 || $code == 42 ]] && return 0
    nap "$GRACE"  # give the others time to log their exceptions first
    return "$code"
}

step() {  # program and arguments: run them as one srun task for each rank on the chosen nodes, with srun_options
    local nodes
    nodes=$(tr ' ' , <<< "$NODES")
    exec setsid srun "${srun_options[@]}" --export=ALL --nodes="$NODE_COUNT" --nodelist="$nodes" --ntasks="$RANKS" \
        --ntasks-per-node="$TASKS_PER_NODE" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
        --distribution=block --input=none --job-name="$STEP_NAME" \
        bash -c "$(declare -f split_python load_settings count_oom_kills note_exit nap await run_task)
        run_task \"\$@\"" task "$@"
}

end_steps() {  # kill all tasks of earlier rounds of this launcher; other steps of the job are not its own
    local steps left="Slurm does not answer" ends=$((SECONDS + 60))
    [[ ${leaving:-} == USR1 ]] && ends=$((SECONDS + 20))
    while ((SECONDS < ends)); do
        if steps=$(timeout --kill-after=5 20 squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' 2> /dev/null); then
            left=$(awk -v name="$STEP_NAME" '$2 == name { print $1 }' <<< "$steps")
            [[ -z $left ]] && return
            xargs timeout --kill-after=5 20 scancel --signal=KILL <<< "$left" 2> /dev/null
        fi
        nap 1
    done
    echo "$(date '+%F %T') steps of earlier rounds do not end: $left"
}

# ---------------------------------------------------------------------------------------------------------------------
# One round or one preflight, inside `timeout`. After the first rank has ended, the others have limited time to end.
# ---------------------------------------------------------------------------------------------------------------------

mark_launch() {  # the time stamp for `has_spoken`; false on a full disk, and then no rank counts as silent
    touch "$OMNIMORPH_RUN/.launched"
}

has_spoken() {  # whether a rank has begun its log; before that, only the launcher watches over it
    [[ -n $(find "$OMNIMORPH_RUN" -maxdepth 1 -name 'rank*.jsonl' -newer "$OMNIMORPH_RUN/.launched") ]]
}

run_step() {  # run the ranks as srun tasks; srun ends the others if one fails, or LINGER seconds after a good end
    local srun asked="" next=0 spoken="" began=$SECONDS
    local -a srun_options=(--kill-on-bad-exit=1 --wait="$LINGER")
    trap 'asked=1' TERM USR1 INT HUP
    mark_launch || spoken=1
    step OM_train_3modes.py "$@" &
    srun=$!
    while kill -0 "$srun" 2> /dev/null; do
        nap 0.5
        if [[ -z $spoken ]]; then
            if has_spoken; then spoken=1
            elif [[ -n $asked ]]; then  # srun may not handle signals yet, and there is nothing to save
                end_steps
                return 42
            elif ((SECONDS - began > START_SECONDS)); then end_steps
            fi
        fi
        if [[ -n $asked && -n $spoken ]] && ((SECONDS >= next)); then
            kill -USR1 "$srun" 2> /dev/null  # srun passes it on; repeated, since a rank may not handle it yet
            next=$((SECONDS + 5))
        fi
    done
    wait "$srun"
}

run_ranks() {  # run the ranks as processes of this host
    local -a pids=()
    local rank code patience oom_kills asked="" next=0 first="" until="" spoken="" left=$RANKS began=$SECONDS
    oom_kills=$(count_oom_kills)
    trap 'asked=1' TERM USR1 INT HUP
    mark_launch || spoken=1
    for ((rank = 0; rank < RANKS; rank++)); do
        # Before Python handles a signal it would die of it; USR1 is sent repeatedly.
        (trap '' TERM USR1 INT HUP
            RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS exec "${INTERPRETER[@]}" OM_train_3modes.py "$@") &
        pids[rank]=$!
    done
    while ((left > 0)); do
        nap 0.1
        for rank in "${!pids[@]}"; do
            kill -0 "${pids[rank]}" 2> /dev/null && continue
            wait "${pids[rank]}"
            code=$?
            note_exit "$rank" "$code"
            unset "pids[rank]"
            left=$((left - 1))
            # The round's exit code is that of the first rank that failed, else that of the last rank.
            if [[ -z $first || $first == 0 || $first == 42 ]]; then first=$code; fi
            # Other ranks need seconds to log their exceptions; after a good end they may still be finishing.
            patience=$GRACE
            [[ $code == 0 || $code == 42 ]] && patience=$LINGER
            [[ -n $until ]] || until=$((SECONDS + patience))
        done
        if [[ -z $spoken ]]; then
            if has_spoken; then spoken=1
            elif [[ -n $asked ]]; then first=42 until=$((began - 1))  # there is nothing to save yet
            elif ((SECONDS - began > START_SECONDS)); then until=$((began - 1))
            fi
        fi
        if [[ -n $asked ]] && ((left > 0 && SECONDS >= next)); then
            kill -USR1 "${pids[@]}" 2> /dev/null
            next=$((SECONDS + 5))
        fi
        if [[ -n $until ]] && ((left > 0 && SECONDS > until)); then
            end_ranks
            [[ -n $asked && -z $spoken ]] || if [[ $first == 0 || $first == 42 ]]; then first=1; fi
            break
        fi
    done
    return "${first:-1}"
}

end_ranks() {  # kill all of `pids` at once: a process that a driver or file system holds (state D) dies later
    local ends=$((SECONDS + 5))
    kill -KILL "${pids[@]}" 2> /dev/null
    for rank in "${!pids[@]}"; do
        await "${pids[rank]}" $((ends > SECONDS ? ends - SECONDS : 0))
        note_exit "$rank" "$code" ', "by_launcher": true'
        kill -0 "${pids[rank]}" 2> /dev/null && echo "rank $rank (process ${pids[rank]}) was killed and does not end:" \
            "a driver or a file system holds it"
    done
}

start_preflight() {  # run one task for each rank; their findings go to standard output
    local -a srun_options=(--kill-on-bad-exit=0) pids=()
    local rank
    [[ -n $UNDER_SLURM ]] && step Scripts/preflight/preflight.py --task "$@"  # does not return
    for ((rank = 0; rank < RANKS; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS "${INTERPRETER[@]}" Scripts/preflight/preflight.py --task "$@" &
        pids[rank]=$!
    done
    wait "${pids[@]}"
}

[[ -n ${PYTHON:-} ]] && split_python

case ${1:-} in  # this file started by itself inside `timeout`, with the variables that the part below has set
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
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

[[ -t 2 ]] || export TQDM_MININTERVAL=${TQDM_MININTERVAL:-60}  # bars in a job's log: a line a minute
unset RANK LOCAL_RANK WORLD_SIZE OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_ATTEMPT OMNIMORPH_ROUND OMNIMORPH_STEP_BACK
unset OMNIMORPH_STEP OMNIMORPH_PATIENCE_S OMNIMORPH_STAGE
only_preflight="" dry_run="" arguments=() preflight_options=() want_preflight="" before=""
for word in "$@"; do
    # A path that exists in the folder where the command was typed is relative to that folder.
    [[ $before == --config || $before == --init-from ]] && [[ -e $typed_in/$word ]] && word=$typed_in/$word
    [[ $word == --config=* || $word == --init-from=* ]] && [[ -e $typed_in/${word#*=} ]] \
        && word=${word%%=*}=$typed_in/${word#*=}
    before=$word
    case $word in
        -h | --help)
            sed -n '/^# Train until/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p}' "$script"
            exit 0
            ;;
        --dry-run) dry_run=1 ;;
        --preflight) only_preflight=1 ;;
        --no-preflight) want_preflight=no ;;
        --allow-tmp) preflight_options+=(--allow-tmp) ;;
        *) arguments+=("$word") ;;
    esac
done
((${#arguments[@]})) || arguments=(--config Config/config_om.yaml)

# srun and salloc --pty of old give one task of the job, in which an srun waits for room that never comes. Slurm numbers
# its batch and interactive steps from 4294967290 on.
if [[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} && ${SLURM_STEP_ID:-} =~ ^[0-9]{1,8}$ ]]; then
    echo "error: this shell is a task of srun itself (step $SLURM_JOB_ID.$SLURM_STEP_ID), and it cannot start others:" \
        "use sbatch or salloc, or RANKS=n for processes of this host" >&2
    exit 43
fi
UNDER_SLURM="" STEP_NAME=omnimorph-$$-$RANDOM
[[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} ]] && command -v srun > /dev/null && UNDER_SLURM=1
# A task of a job array: the first one's number means all of them to `scontrol requeue`.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} JOB=${JOB:-${SLURM_JOB_ID:-}}
export UNDER_SLURM STEP_NAME

# ---------------------------------------------------------------------------------------------------------------------
# Output: to the log and to the standard output. A full disk loses output, but ends no process that writes.
# ---------------------------------------------------------------------------------------------------------------------

drain() {  # pass standard input on; drop it while it cannot be written
    trap '' TERM INT USR1 HUP PIPE
    until cat 2> /dev/null; do timeout 1 cat > /dev/null; done
}

split() {  # pass standard input on and to the log; `tee` gives up a file on a full disk, but never a pipe
    trap '' TERM INT USR1 HUP PIPE
    tee >(drain >> "$log") | drain
}

log=Logs/train_multi_${SLURM_JOB_ID:-local-$(date +%Y%m%d-%H%M%S)-$$}.out
if ! mkdir -p Logs || ! touch "$log"; then exec > >(drain)
elif [[ /dev/stdout -ef $log ]]; then exec > >(drain)  # under sbatch
else exec > >(split)
fi
speaker=$!
exec 2>&1
# shellcheck disable=SC2154  # `code` is set by `await`
trap 'exec > /dev/null 2>&1; await "$speaker" 5' EXIT  # write the last output before the shell ends

if [[ -z ${CLUSTER:-} ]]; then
    CLUSTER=local
    [[ -f Config/cluster/${SLURM_CLUSTER_NAME:-}.env ]] && CLUSTER=$SLURM_CLUSTER_NAME
fi
if [[ ! -f Config/cluster/$CLUSTER.env ]]; then
    known=$(cd Config/cluster && ls -- *.env)
    echo "error: CLUSTER=$CLUSTER: there is no Config/cluster/$CLUSTER.env; known are ${known//$'\n'/, }"
    exit 43
fi

# ---------------------------------------------------------------------------------------------------------------------
# Leaving: signals count at any time, also between rounds
# ---------------------------------------------------------------------------------------------------------------------

leaving=""
child=""
leave() {  # signal: remember the first one, since Slurm's TERM at the time limit follows its USR1
    leaving=${leaving:-$1}
    [[ -n $child ]] && kill -TERM "$child" 2> /dev/null
}
trap 'leave TERM' TERM
trap 'leave USR1' USR1
trap 'leave INT' INT
trap 'leave HUP' HUP

ask() {  # seconds, command: set `answer` to its output and `code` to its exit code. stoppable=1: a signal ends it
    local output
    exec {output}< <(exec "${@:2}")
    [[ -n ${stoppable:-} ]] && child=$!
    await $! "$1"
    child="" answer=""
    ((code > 128)) || IFS= read -r -d '' answer <&"$output"  # its children may still hold the pipe
    answer=${answer%$'\n'}
    exec {output}<&-
}

take() {  # names: export each with its value in `answer`, lines of NAME=value. Nothing in them is run
    local line
    while IFS= read -r line; do
        [[ " $* " == *" ${line%%=*} "* ]] && printf -v "${line%%=*}" %s "${line#*=}" && export "${line%%=*}"
    done <<< "$answer"
}

say() { echo "$(date '+%F %T') $*"; }

job_word() {  # name: print that field of what Slurm says of this job
    timeout --kill-after=5 20 scontrol show job -o "$JOB" | grep -oE " $1=[^ ]+" | head -n 1 | cut -d= -f2
}

seconds_left() {  # print the seconds to the job's time limit; nothing if it is not known
    local ends
    ends=$(date -d "$(job_word EndTime)" +%s 2> /dev/null) && echo $((ends - $(date +%s)))
}

seconds_to_leave() {  # print how long a round may go on before the time limit; a third or 90 s is left for the rest
    local left
    left=$(seconds_left) left=${left:-240}
    echo $((left > 270 ? left - 90 : left * 2 / 3))
}

requeue() {  # put the job back into the queue; false if that would only repeat this start of it
    local tries left
    [[ $(job_word JobState) == CANCELLED* ]] && return  # by a person, meanwhile
    if [[ -z ${OMNIMORPH_TOKEN:-} ]] || ! ask 60 "${INTERPRETER[@]}" -m Supervisor.attempts gained || ((code)); then
        left=$(seconds_left)
        if ((${left:-0} < 1200)); then  # else it was preempted, and has had no chance
            say "job $JOB is not put back into the queue: it has reached its time limit without saving a single new" \
                "step. Give it a longer --time: 480 s before the limit it already saves and leaves"
            return 1
        fi
    fi
    say "the time limit of job $JOB is near: back into the queue, to continue from there"
    for ((tries = 0; tries < 3; tries++)); do
        timeout --kill-after=5 20 scontrol requeue "$JOB" && return
        nap 2
    done
    echo "it could not be put back into the queue: the same command that submitted it continues the run"
}

remove_copies() {  # of the cache (data.stage), on each node: ranks that were killed have left them
    local node
    local -a pids=() command=("${INTERPRETER[@]}" -m Dataloader.staging "$OMNIMORPH_STAGE")
    for node in $HOSTS; do
        if [[ -n $UNDER_SLURM ]]; then on_node "$node" "${command[@]}" & else "${command[@]}" & fi
        pids+=($!)
    done
    for node in "${pids[@]}"; do await "$node" 40; done
}

finish() {  # exit code, message: unlock the folder, print the message, requeue if the time limit is near, exit
    [[ -n $UNDER_SLURM ]] && end_steps
    [[ -n ${OMNIMORPH_STAGE:-} ]] && remove_copies
    [[ -n ${OMNIMORPH_TOKEN:-} ]] && ask 60 "${INTERPRETER[@]}" -m Supervisor.attempts unlock
    say "$2"
    if [[ $leaving == USR1 && $1 == 42 && -n $UNDER_SLURM ]]; then requeue || exit 43; fi
    exit "$1"
}

# ---------------------------------------------------------------------------------------------------------------------
# Site, nodes and ranks
# ---------------------------------------------------------------------------------------------------------------------

overlap=()  # lets `on_node` run beside other steps of the job; older versions of Slurm do not know it
[[ -n $UNDER_SLURM ]] && srun --help 2> /dev/null | grep -q -- --overlap && overlap=(--overlap)

on_node() {  # node, command: run a single task there, with a time limit
    exec timeout --kill-after=5 30 setsid srun --quiet "${overlap[@]}" --job-name="$STEP_NAME" --export=ALL --nodes=1 \
        --ntasks=1 --nodelist="$1" --input=none "${@:2}"
}

choose_port() {  # port, free on this host: set MASTER_PORT to the user's, to one free on rank 0's node, or to it
    MASTER_PORT=${fixed_port:-$1}
    if [[ -z $fixed_port && -n $UNDER_SLURM && ${SLURMD_NODENAME:-} != "${NODES%% *}" ]]; then
        MASTER_PORT=$(on_node "${NODES%% *}" "${INTERPRETER[@]}" -m Supervisor.attempts port)
        [[ $MASTER_PORT =~ ^[0-9]+$ ]] || MASTER_PORT=$1  # most likely it is free there too
    fi
}

probe() {  # nodes: add those on which a task can be started to `good`, set `lost` to the others
    local index
    local -a asked=("$@") pids=()
    lost=()
    for index in "${!asked[@]}"; do  # one srun for each: a node that does not answer would make a common srun fail
        on_node "${asked[index]}" true &
        pids[index]=$!
    done
    for index in "${!pids[@]}"; do
        await "${pids[index]}" 40
        if ((code == 0)); then good+=("${asked[index]}"); else lost+=("${asked[index]}"); fi
    done
}

choose_nodes() {  # set NODES to the allocation's nodes that can start a task and that preflight has not excluded
    local node tries ends=$((SECONDS + patience))
    local -a hosts=() wanted=() good=() lost=()
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#hosts[@]})) || finish 43 "stopped: scontrol does not name the nodes of this job, see the error above"
    RANKS_ASKED=$((${#hosts[@]} * TASKS))
    for node in "${hosts[@]}"; do
        [[ " $excluded " == *" $node "* ]] || wanted+=("$node")
    done
    lost=("${wanted[@]}")
    for ((tries = 1; ; tries++)); do
        probe "${lost[@]}"
        [[ -n $leaving || ${#lost[@]} == 0 ]] && break
        # A slow node gets a second try; if no node answers, Slurm itself may be down.
        ((${#good[@]} > 0 && tries > 1 || SECONDS >= ends)) && break
        say "no task can be started on ${lost[*]}: tried again"
        nap 10
    done
    [[ -n $leaving ]] && finish 42 "left by $leaving; the same command continues the run"
    for node in "${lost[@]}"; do
        say "left out, since no task can be started there: $node ($(timeout 20 sinfo -h -n "$node" -o %T | head -n 1))"
    done
    NODES=$(for node in "${wanted[@]}"; do [[ " ${good[*]} " == *" $node "* ]] && echo "$node"; done | paste -sd ' ')
    NODE_COUNT=${#good[@]} TASKS_PER_NODE=$TASKS RANKS=$((${#good[@]} * TASKS))
    ((NODE_COUNT > 0)) || finish 43 "stopped: no node of the allocation is left"
    MASTER_ADDR=${fixed_address:-${NODES%% *}}
    if [[ -z $fixed_address ]] && ! getent hosts "$MASTER_ADDR" > /dev/null; then  # Slurm knows the address
        MASTER_ADDR=$(timeout 20 scontrol show node -o "${NODES%% *}" | grep -oE 'NodeAddr=[^ ]+' | cut -d= -f2)
    fi
}

fixed_address=${MASTER_ADDR:-} fixed_port=${MASTER_PORT:-} excluded="" patience=600 round=0
export CLUSTER NODES NODE_COUNT TASKS_PER_NODE MASTER_ADDR MASTER_PORT
if [[ -n $UNDER_SLURM ]]; then
    if [[ -z ${SLURM_TASKS_PER_NODE:-} ]]; then
        echo "error: Slurm does not say how many tasks a node has: submit with --ntasks-per-node"
        exit 43
    fi
    if [[ $SLURM_TASKS_PER_NODE == *,* ]]; then
        echo "error: the nodes have different numbers of tasks ($SLURM_TASKS_PER_NODE): submit with --ntasks-per-node"
        exit 43
    fi
    TASKS=${SLURM_TASKS_PER_NODE%%(*}
    choose_nodes
    cores=${SLURM_CPUS_PER_TASK:-1}
else
    NODES=$(hostname) NODE_COUNT=1
    if [[ -n ${RANKS:-} && ${SLURM_NNODES:-1} != 1 ]]; then
        echo "error: RANKS=$RANKS starts processes on this host only, and job $JOB has $SLURM_NNODES nodes: unset RANKS"
        exit 43
    fi
fi
if [[ -n ${RANKS:-} && ! $RANKS =~ ^[1-9][0-9]*$ ]]; then
    echo "error: RANKS=$RANKS: give the number of processes on this host, at least 1"
    exit 43
fi
SITE_OPTIONS=()
load_settings
arguments=("${SITE_OPTIONS[@]}" "${arguments[@]}")  # the user's come later and take precedence
export PREFLIGHT_SECONDS=${PREFLIGHT_SECONDS:-45}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
export PYTHON
split_python
needed='("torch", "numpy", "nibabel", "scipy", "yaml")'
missing=$("${INTERPRETER[@]}" -c "import importlib.util as u; print(*(n for n in $needed if not u.find_spec(n)))") \
    || missing=Python
if [[ -n $missing ]]; then
    echo "error: $PYTHON lacks $missing: name the interpreter of the environment with PYTHON=path, or install what it" \
        "lacks (docs/install.md)"
    exit 43
fi
if [[ -z $UNDER_SLURM ]]; then
    if [[ -z ${RANKS:-} ]]; then
        RANKS=$("${INTERPRETER[@]}" -c 'import torch; print(max(torch.accelerator.device_count(), 1))') || exit 43
    fi
    TASKS=$RANKS TASKS_PER_NODE=$RANKS RANKS_ASKED=$RANKS
    MASTER_ADDR=${fixed_address:-127.0.0.1}
    cores=$(($(nproc) / RANKS))
fi
export RANKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

if [[ -n $dry_run ]]; then
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=$RANKS exec "${INTERPRETER[@]}" OM_train_3modes.py --dry-run "${arguments[@]}"
fi

times=${SLURM_RESTART_COUNT:-0} life=""
((times > 0)) && life=", start $((times + 1)) of job $JOB"
say "$RANKS ranks on $NODES, $OMP_NUM_THREADS threads each, log $log$life"
echo "settings (Config/cluster/$CLUSTER.env and what was set before):"
"${INTERPRETER[@]}" -m Runtime.provenance

# ---------------------------------------------------------------------------------------------------------------------
# Preflight: find a misconfigured allocation within a minute
# ---------------------------------------------------------------------------------------------------------------------

look() {  # options: run one preflight, set `code` and `answer`. A signal ends it
    local findings tasks
    exec {findings}< <(exec timeout --kill-after=5 "$PREFLIGHT_SECONDS" bash "$script" --preflight-tasks "$@")
    tasks=$!
    stoppable=1 ask $((${PREFLIGHT_SECONDS%.*} + 60)) "${INTERPRETER[@]}" Scripts/preflight/preflight.py --collect \
        "${repeat[@]}" "$@" <&"$findings"
    exec {findings}<&-
    kill "$tasks" 2> /dev/null
    local judged=$code
    await "$tasks" 10
    code=$judged
    [[ -n $UNDER_SLURM ]] && end_steps
    [[ -n $leaving ]] && finish 42 "left by $leaving during the preflight"
}

preflight() {  # options: keep in NODES those that work; end the script if too few do
    local EXCLUDED="" ends=$((SECONDS + patience))
    local -a repeat=(--may-repeat)
    while :; do
        ask 60 "${INTERPRETER[@]}" -m Supervisor.attempts port
        choose_port "$answer"
        say "preflight of $RANKS ranks on $NODES"
        look "$@"
        case $code in
            0) return ;;
            75)
                take EXCLUDED
                excluded+=" $EXCLUDED"
                choose_nodes
                ;;
            43)  # of a run that has trained before, this may pass as well
                ((round > 0 && SECONDS < ends)) || finish 43 "stopped: the preflight failed, see the table above"
                say "the preflight failed: once more in 20 s, for up to $patience s in all"
                nap 20
                ;;
            *)  # 76: the fault may pass, such as a file system that hangs for a moment
                ((SECONDS < ends)) || repeat=()
                say "the preflight failed: once more in 20 s, for up to $patience s in all"
                nap 20
                ;;
        esac
    done
}

if [[ -n $only_preflight || (-n $UNDER_SLURM && -z $want_preflight) ]]; then
    preflight "${arguments[@]}" "${preflight_options[@]}"
    [[ -n $only_preflight ]] && finish 0 "the preflight passed"
fi

# ---------------------------------------------------------------------------------------------------------------------
# The restart loop
# ---------------------------------------------------------------------------------------------------------------------

begin_round() {  # lock the folder and number the attempt; retry while the fault may pass
    local ends=$((SECONDS + patience)) nodes
    while :; do
        nodes=$(wc -w <<< "$HOSTS")
        stoppable=1 ask 3600 "${INTERPRETER[@]}" -m Supervisor.attempts begin "${arguments[@]}" --launcher-pid $$ \
            --nodes "$nodes" --tasks "$TASKS" --of "$RANKS_ASKED"
        [[ $code == 0 ]] && break
        [[ -n $leaving ]] && finish 42 "left by $leaving before round $round; the same command continues the run"
        [[ $code == 43 || ($code == 2 && $round == 0) ]] && finish 43 "stopped before round $round: see the error above"
        ((SECONDS < ends)) || finish 43 "stopped before round $round, after $patience s of the error above"
        say "round $round cannot begin yet (code $code): tried again"
        nap 5
    done
    take OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_STEP_BACK OMNIMORPH_STEP OMNIMORPH_ATTEMPT OMNIMORPH_ROUND \
        OMNIMORPH_PATIENCE_S NODE_COUNT TASKS_PER_NODE RANKS FREE_PORT ROUND_SECONDS LEAVE_AFTER MAX_ROUNDS \
        PAUSE_PLANNED PAUSE_CRASH GRACE START_SECONDS LINGER LEAVE_SECONDS OMNIMORPH_STAGE
    NODES=$(cut -d ' ' -f "1-$NODE_COUNT" <<< "$HOSTS")  # the nodes that can divide a step evenly
}

end_round() {  # exit code of the round: have it judged, set `decision`
    local seconds=900
    [[ $leaving == USR1 ]] && seconds=30
    ask "$seconds" "${INTERPRETER[@]}" -m Supervisor.attempts end "$1"
    decision=$code
}

run_round() {  # arguments: run a round, set `code`. Near Slurm's time limit, ranks that have not left are killed
    local told="" ends="" began=$SECONDS
    timeout --kill-after="$LEAVE_SECONDS" "$ROUND_SECONDS" bash "$script" --round "$@" &
    child=$!
    while kill -0 "$child" 2> /dev/null; do
        if [[ -n $leaving && -z $told ]]; then
            told=1
            kill -TERM "$child" 2> /dev/null  # the signal may have come before the child existed
            [[ $leaving == USR1 && -n $UNDER_SLURM ]] && ends=$((SECONDS + $(seconds_to_leave)))
        fi
        if [[ -n $ends ]] && ((SECONDS >= ends)); then
            say "the ranks have not left in time before the time limit: they are ended"
            kill -KILL -- "-$child"
            ends="" began=-1000000000
        fi
        nap 0.5
    done
    await "$child"
    kill -KILL -- "-$child" 2> /dev/null  # ranks whose shell was killed would train on beside those of the next round
    child=""
    [[ -n $UNDER_SLURM ]] && end_steps
    # Before the time limit of the round: somebody has killed its shell.
    [[ $code == 137 ]] && ((SECONDS - began < ${ROUND_SECONDS%.*})) && code=1
    # 143: TERM ended the shell of the round before it set its trap.
    [[ -n $leaving && $code == 143 ]] && code=42
}

HOSTS=$NODES
for ((round = 0; ; round++)); do
    begin_round
    choose_port "$FREE_PORT"
    patience=${OMNIMORPH_PATIENCE_S:-$patience} patience=${patience%.*}
    code=42
    [[ -n $leaving ]] || run_round "${arguments[@]}" --max-seconds-before-restart "$LEAVE_AFTER"
    end_round "$code"
    case $decision in
        0) finish 0 "done after $((round + 1)) rounds" ;;
        43) finish 43 "stopped after $((round + 1)) rounds; verdict in $OMNIMORPH_RUN/verdict.json" ;;
        42) seconds=$PAUSE_PLANNED ;;
        *) seconds=$PAUSE_CRASH ;;
    esac
    [[ -n $leaving ]] && finish 42 "left by $leaving; the same command continues the run"
    ((round + 1 >= MAX_ROUNDS)) && finish 43 "stopped after $MAX_ROUNDS rounds (run.max_rounds)"
    nap "$seconds"
    [[ -n $leaving ]] && finish 42 "left by $leaving; the same command continues the run"
    # The node of a rank that fell silent may be lost, that of a second death may be ill.
    if [[ -n $UNDER_SLURM && -z $want_preflight && $decision == 1 ]] \
        && grep -q '"check_nodes": true' "$OMNIMORPH_RUN/verdict.json"; then
        choose_nodes
        preflight "${arguments[@]}" "${preflight_options[@]}"
        HOSTS=$NODES
    fi
done
