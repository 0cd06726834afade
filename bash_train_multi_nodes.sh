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
# Slurm sends 480 s before the time limit: the same, and the job goes back into the queue, to continue where it was; what
# hangs then is ended in time for that. With fewer nodes than at first a step has the same samples (Runtime/global_batch.py).
#
# Paths count from the repository's folder, wherever this is started; --config and --init-from also from where it is.
set -u

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
    local extra=${3:-} kills lock=$OMNIMORPH_RUN/lock.json
    # Whoever has taken the folder over meanwhile writes this log now.
    [[ -e $lock ]] && ! grep -q "$OMNIMORPH_TOKEN" "$lock" && return
    kills=$(count_oom_kills)
    if [[ $2 == 137 && -n $kills && $kills != "$oom_kills" ]]; then extra+=', "oom_kill": true'; fi
    printf '{"event": "exit", "attempt": %s, "rank": %s, "code": %s, "time": %s%s}\n' \
        "$OMNIMORPH_ATTEMPT" "$1" "$2" "$(date +%s.%N)" "$extra" >> "$OMNIMORPH_RUN/rank$1.jsonl"
}

nap() {  # seconds; a trapped signal ends it
    local sleeper
    sleep "$1" > /dev/null 2>&1 &
    sleeper=$!
    wait "$sleeper" || kill "$sleeper" 2> /dev/null
}

await() {  # pid, seconds: sets `code` to how it ended, 137 where it is killed after them, whether or not it dies of it
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

run_task() {  # one task of srun: variables of the rank, settings again (a node's profile may differ), the program
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    load_settings
    [[ $1 == Scripts/preflight/preflight.py ]] && exec "$PYTHON" "$@"
    local child code oom_kills status awake=9
    oom_kills=$(count_oom_kills)
    trap ':' TERM USR1 INT  # Slurm sends them to the rank too; it saves and leaves, and is waited for
    (trap '' USR1; exec "$PYTHON" "$@") &  # until Python listens, USR1 would end it; it is sent again
    child=$!
    while kill -0 "$child" 2> /dev/null; do  # a stopped rank is woken before it is ended, and knows nothing of it
        status=$(cat "/proc/$child/stat" 2> /dev/null)
        if [[ ${status##*) } == T* ]]; then awake=0; else awake=$((awake + 1)); fi
        sleep 1 > /dev/null 2>&1 &
        wait -n
    done
    await "$child"
    if ((awake < 5)); then note_exit "$RANK" "$code" ', "stopped": true'; else note_exit "$RANK" "$code"; fi
    # --kill-on-bad-exit would end the others in the middle of their leaving.
    [[ $code == 0 || $code == 42 ]] && return 0
    nap "$GRACE"  # and here in the middle of their last words
    return "$code"
}

step() {  # program and arguments: one task of srun for each rank on the chosen nodes; options in srun_options
    local nodes
    nodes=$(tr ' ' , <<< "$NODES")
    exec setsid srun "${srun_options[@]}" --export=ALL --nodes="$NODE_COUNT" --nodelist="$nodes" --ntasks="$RANKS" \
        --ntasks-per-node="$TASKS_PER_NODE" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
        --distribution=block --input=none --job-name="$STEP_NAME" \
        bash -c "$(declare -f load_settings count_oom_kills note_exit nap await run_task); run_task \"\$@\"" task "$@"
}

end_steps() {  # no task of an earlier round of this launcher may be left; other steps of the job are not its own
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
# One round or one preflight, inside `timeout`. After the first rank has ended, the others are not waited for for ever.
# ---------------------------------------------------------------------------------------------------------------------

mark_launch() {  # what `has_spoken` compares with; false on a full disk, which does not make a rank silent
    touch "$OMNIMORPH_RUN/.launched"
}

has_spoken() {  # whether a rank has begun its log; until then nobody but the launcher watches
    [[ -n $(find "$OMNIMORPH_RUN" -maxdepth 1 -name 'rank*.jsonl' -newer "$OMNIMORPH_RUN/.launched") ]]
}

run_step() {  # the ranks as tasks of srun, which ends the others when one ends badly, and LINGER after a good end
    local srun asked="" next=0 spoken="" began=$SECONDS
    local -a srun_options=(--kill-on-bad-exit=1 --wait="$LINGER")
    trap 'asked=1' TERM USR1 INT
    mark_launch || spoken=1
    step OM_train_3modes.py "$@" &
    srun=$!
    while kill -0 "$srun" 2> /dev/null; do
        nap 0.5
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
    local rank code patience oom_kills asked="" next=0 first="" until="" spoken="" left=$RANKS began=$SECONDS
    oom_kills=$(count_oom_kills)
    trap 'asked=1' TERM USR1 INT
    mark_launch || spoken=1
    for ((rank = 0; rank < RANKS; rank++)); do
        # Until Python listens, a signal would end it; USR1 is sent again.
        (trap '' TERM USR1 INT; RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS exec "$PYTHON" OM_train_3modes.py "$@") &
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
            # The first bad end names the cause; until then any end.
            if [[ -z $first || $first == 0 || $first == 42 ]]; then first=$code; fi
            # Last words take seconds; after a good end the others may still be finishing theirs.
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

end_ranks() {  # of `pids`, all at once: one that a driver or a file system holds (state D) dies later than the others
    local ends=$((SECONDS + 5))
    kill -KILL "${pids[@]}" 2> /dev/null
    for rank in "${!pids[@]}"; do
        await "${pids[rank]}" $((ends > SECONDS ? ends - SECONDS : 0))
        note_exit "$rank" "$code" ', "by_launcher": true'
        kill -0 "${pids[rank]}" 2> /dev/null && echo "rank $rank (process ${pids[rank]}) was killed and does not end:" \
            "a driver or a file system holds it"
    done
}

start_preflight() {  # one task for each rank; what they find goes to standard output
    local -a srun_options=(--kill-on-bad-exit=0) pids=()
    local rank
    [[ -n $UNDER_SLURM ]] && step Scripts/preflight/preflight.py --task "$@"  # does not come back
    for ((rank = 0; rank < RANKS; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS "$PYTHON" Scripts/preflight/preflight.py --task "$@" &
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
# What is asked for
# ---------------------------------------------------------------------------------------------------------------------

unset RANK LOCAL_RANK WORLD_SIZE OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_ATTEMPT OMNIMORPH_ROUND OMNIMORPH_STEP_BACK
unset OMNIMORPH_STEP OMNIMORPH_PATIENCE_S
only_preflight="" arguments=() preflight_options=() want_preflight="" before=""
for word in "$@"; do
    # What the shell has completed where it was typed is meant from there.
    [[ $before == --config || $before == --init-from ]] && [[ -f $typed_in/$word ]] && word=$typed_in/$word
    before=$word
    case $word in
        --preflight) only_preflight=1 ;;
        --no-preflight) want_preflight=no ;;
        --allow-tmp) preflight_options+=(--allow-tmp) ;;
        *) arguments+=("$word") ;;
    esac
done
((${#arguments[@]})) || arguments=(--config Config/config_om.yaml)

UNDER_SLURM="" STEP_NAME=omnimorph-$$-$RANDOM
if [[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} ]] && command -v srun > /dev/null; then UNDER_SLURM=1; fi
export UNDER_SLURM STEP_NAME

# ---------------------------------------------------------------------------------------------------------------------
# What is said: to the log and to where we were started. A full disk there loses words; it ends nobody who speaks.
# ---------------------------------------------------------------------------------------------------------------------

drain() {  # passes standard input on; while it cannot be written it is dropped
    trap '' TERM INT USR1 HUP PIPE
    until cat 2> /dev/null; do timeout 1 cat > /dev/null; done
}

split() {  # standard input to the log too; both ways are pipes, which `tee` would never give up
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
trap 'exec > /dev/null 2>&1; await "$speaker" 5' EXIT  # the last words too are written before we are gone

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
# Leaving: a signal is heard at any time, between rounds too
# ---------------------------------------------------------------------------------------------------------------------

leaving=""
child=""
leave() {  # the first signal counts: Slurm's TERM at the time limit follows its USR1
    leaving=${leaving:-$1}
    [[ -n $child ]] && kill -TERM "$child" 2> /dev/null
}
trap 'leave TERM' TERM
trap 'leave USR1' USR1
trap 'leave INT' INT

ask() {  # seconds, command: sets `answer` to what it prints and `code` to how it ended. stoppable=1: a signal ends it
    local output
    exec {output}< <(exec "${@:2}")
    [[ -n ${stoppable:-} ]] && child=$!
    await $! "$1"
    child="" answer=""
    ((code > 128)) || IFS= read -r -d '' answer <&"$output"  # what it has started itself may still hold the pipe
    answer=${answer%$'\n'}
    exec {output}<&-
}

say() { echo "$(date '+%F %T') $*"; }

job_word() {  # name: what Slurm says of this job under that name
    timeout --kill-after=5 20 scontrol show job -o "$SLURM_JOB_ID" | grep -oE " $1=[^ ]+" | head -n 1 | cut -d= -f2
}

seconds_to_leave() {  # how long a round may go on before the time limit, with a third or 90 s for what comes after it
    local word ends left=240
    word=$(job_word EndTime)
    [[ -n $word ]] && ends=$(date -d "$word" +%s 2> /dev/null) && left=$((ends - $(date +%s)))
    echo $((left > 270 ? left - 90 : left * 2 / 3))
}

requeue() {
    local tries
    [[ $(job_word JobState) == CANCELLED* ]] && return  # by a person, meanwhile
    say "the time limit of job $SLURM_JOB_ID is near: back into the queue, to continue from there"
    for ((tries = 0; tries < 3; tries++)); do
        timeout --kill-after=5 20 scontrol requeue "$SLURM_JOB_ID" && return
        nap 2
    done
    echo "it could not be requeued: the same sbatch command continues the run"
}

finish() {  # exit code, last words
    [[ -n $UNDER_SLURM ]] && end_steps
    [[ -n ${OMNIMORPH_TOKEN:-} ]] && ask 60 "$PYTHON" -m Runtime.attempts unlock
    say "$2"
    [[ $leaving == USR1 && $1 == 42 && -n $UNDER_SLURM ]] && requeue
    exit "$1"
}

# ---------------------------------------------------------------------------------------------------------------------
# Where we are: site, nodes and ranks
# ---------------------------------------------------------------------------------------------------------------------

overlap=()  # to try a node, or ask it for a port, whatever else runs in the job; unknown to older Slurms
[[ -n $UNDER_SLURM ]] && srun --help 2> /dev/null | grep -q -- --overlap && overlap=(--overlap)

on_node() {  # node, command: a single task there, with a limit
    exec timeout --kill-after=5 30 setsid srun --quiet "${overlap[@]}" --job-name="$STEP_NAME" --export=ALL --nodes=1 \
        --ntasks=1 --nodelist="$1" --input=none "${@:2}"
}

choose_port() {  # a port that is free on this host, unless rank 0 is on another one or the user has chosen
    MASTER_PORT=${fixed_port:-$1}
    if [[ -z $fixed_port && -n $UNDER_SLURM && ${SLURMD_NODENAME:-} != "${NODES%% *}" ]]; then
        MASTER_PORT=$(on_node "${NODES%% *}" "$PYTHON" -m Runtime.attempts port)
        [[ $MASTER_PORT =~ ^[0-9]+$ ]] || MASTER_PORT=$1  # most likely it is free there too
    fi
}

probe() {  # nodes: sets `good` and `lost` to those on which a task can be started and the others
    local index
    local -a asked=("$@") pids=()
    lost=()
    for index in "${!asked[@]}"; do  # one node that does not answer would take a whole srun with it
        on_node "${asked[index]}" true &
        pids[index]=$!
    done
    for index in "${!pids[@]}"; do
        await "${pids[index]}" 40
        if ((code == 0)); then good+=("${asked[index]}"); else lost+=("${asked[index]}"); fi
    done
}

choose_nodes() {  # NODES: those of the allocation on which a task can be started and which preflight has not excluded
    local node tries ends=$((SECONDS + patience))
    local -a hosts=() wanted=() good=() lost=()
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    RANKS_ASKED=$((${#hosts[@]} * TASKS))
    for node in "${hosts[@]}"; do
        [[ " $excluded " == *" $node "* ]] || wanted+=("$node")
    done
    lost=("${wanted[@]}")
    for ((tries = 1; ; tries++)); do
        probe "${lost[@]}"
        [[ -n $leaving || ${#lost[@]} == 0 ]] && break
        # A slow node gets a second chance; where none answers, Slurm itself may be away.
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
    if [[ -z $fixed_address ]] && ! getent hosts "$MASTER_ADDR" > /dev/null; then  # Slurm knows where its nodes are
        MASTER_ADDR=$(timeout 20 scontrol show node -o "${NODES%% *}" | grep -oE 'NodeAddr=[^ ]+' | cut -d= -f2)
    fi
}

fixed_address=${MASTER_ADDR:-} fixed_port=${MASTER_PORT:-} excluded="" patience=600
export CLUSTER NODES NODE_COUNT TASKS_PER_NODE MASTER_ADDR MASTER_PORT
if [[ -n $UNDER_SLURM ]]; then
    if [[ $SLURM_TASKS_PER_NODE == *,* ]]; then
        echo "error: the nodes have different numbers of tasks ($SLURM_TASKS_PER_NODE): submit with --ntasks-per-node"
        exit 43
    fi
    TASKS=${SLURM_TASKS_PER_NODE%%(*}
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
    TASKS=$RANKS TASKS_PER_NODE=$RANKS RANKS_ASKED=$RANKS
    MASTER_ADDR=${fixed_address:-127.0.0.1}
    cores=$(($(nproc) / RANKS))
fi
export RANKS OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

life=${SLURM_RESTART_COUNT:+, start $((SLURM_RESTART_COUNT + 1)) of job $SLURM_JOB_ID}
say "$RANKS ranks on $NODES, $OMP_NUM_THREADS threads each, log $log$life"
echo "settings (Config/cluster/$CLUSTER.env and what was set before):"
"$PYTHON" -m Runtime.provenance

# ---------------------------------------------------------------------------------------------------------------------
# Preflight: a misconfigured allocation is found in a minute
# ---------------------------------------------------------------------------------------------------------------------

look() {  # options: one preflight; sets `code` and `answer`. A signal ends it
    local findings tasks
    exec {findings}< <(exec timeout --kill-after=5 "$PREFLIGHT_SECONDS" bash "$script" --preflight-tasks "$@")
    tasks=$!
    stoppable=1 ask $((${PREFLIGHT_SECONDS%.*} + 60)) "$PYTHON" Scripts/preflight/preflight.py --collect "${repeat[@]}" "$@" \
        <&"$findings"
    exec {findings}<&-
    kill "$tasks" 2> /dev/null
    local judged=$code
    await "$tasks" 10
    code=$judged
    [[ -n $UNDER_SLURM ]] && end_steps
    [[ -n $leaving ]] && finish 42 "left by $leaving during the preflight"
}

preflight() {  # leaves in NODES those that work; ends the script where too few do
    local EXCLUDED=""
    local -a repeat=(--may-repeat)
    while :; do
        ask 60 "$PYTHON" -m Runtime.attempts port
        choose_port "$answer"
        say "preflight of $RANKS ranks on $NODES"
        look "$@"
        case $code in
            0) return ;;
            75)
                eval "$answer"
                excluded+=" $EXCLUDED"
                choose_nodes
                ;;
            43) finish 43 "stopped: the preflight failed, see the table above" ;;
            *)  # 76: what failed may pass, such as a file system that stands still for a moment
                ((${#repeat[@]})) || finish 43 "stopped: the preflight failed twice (code $code), see above"
                repeat=()
                say "the preflight failed: once more in 20 s"
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

begin_round() {  # take the folder and number the attempt; what may pass is waited for
    local ends=$((SECONDS + patience)) nodes
    while :; do
        nodes=$(wc -w <<< "$HOSTS")
        stoppable=1 ask 3600 "$PYTHON" -m Runtime.attempts begin "${arguments[@]}" --launcher-pid $$ \
            --nodes "$nodes" --tasks "$TASKS" --of "$RANKS_ASKED"
        [[ $code == 0 ]] && break
        [[ -n $leaving ]] && finish 42 "left by $leaving before round $round; the same command continues the run"
        [[ $code == 2 || $code == 43 ]] && finish 43 "stopped before round $round: see the error above"
        ((SECONDS < ends)) || finish 43 "stopped before round $round, after $patience s of the error above"
        say "round $round cannot begin yet (code $code): tried again"
        nap 5
    done
    set -a  # export them all
    eval "$answer"
    set +a
    NODES=$(cut -d ' ' -f "1-$NODE_COUNT" <<< "$HOSTS")  # those that can share a step
}

end_round() {  # exit code of the round; sets `decision`
    local seconds=900
    [[ $leaving == USR1 ]] && seconds=30
    ask "$seconds" "$PYTHON" -m Runtime.attempts end "$1"
    decision=$code
}

run_round() {  # sets `code`. What still hangs, validates or saves near the time limit is ended before Slurm does it
    local told="" ends=""
    timeout --kill-after="$LEAVE_SECONDS" "$ROUND_SECONDS" bash "$script" --round "$@" &
    child=$!
    while kill -0 "$child" 2> /dev/null; do
        if [[ -n $leaving && -z $told ]]; then
            told=1
            kill -TERM "$child" 2> /dev/null  # the signal may have come when there was no child yet
            [[ $leaving == USR1 && -n $UNDER_SLURM ]] && ends=$((SECONDS + $(seconds_to_leave)))
        fi
        if [[ -n $ends ]] && ((SECONDS >= ends)); then
            say "the ranks have not left in time before the time limit: they are ended"
            kill -KILL -- "-$child"
            ends=""
        fi
        nap 0.5
    done
    await "$child"
    child=""
    [[ -n $UNDER_SLURM ]] && end_steps
    # Before it listened, TERM has ended the shell itself.
    [[ -n $leaving && $code == 143 ]] && code=42
}

SILENT="vanished|frozen|never started|a rank did not arrive"  # causes after which nodes are looked at again
HOSTS=$NODES
for ((round = 0; ; round++)); do
    begin_round
    choose_port "$FREE_PORT"
    patience=${OMNIMORPH_PATIENCE_S:-$patience} patience=${patience%.*}
    # A healthy round saves and leaves before its time limit, so that the limit only ends hung ones.
    reserve=$(awk -v s="$ROUND_SECONDS" 'BEGIN { r = s / 10; print (r > 300 ? s - 300 : s - r) }')
    code=42
    [[ -n $leaving ]] || run_round "${arguments[@]}" --max-seconds-before-restart "$reserve"
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
    # Ranks that fell silent may have lost their node.
    if [[ -n $UNDER_SLURM && -z $want_preflight && $decision == 1 ]] \
        && grep -qE "\"cause\": \"($SILENT)\"" "$OMNIMORPH_RUN/verdict.json"; then
        choose_nodes
        preflight "${arguments[@]}" "${preflight_options[@]}"
        HOSTS=$NODES
    fi
done
