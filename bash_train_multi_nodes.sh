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
# Train until it is done, across crashes, in rounds: one process per rank, and a verdict when they have ended.
#
#   sbatch [--nodes=N --ntasks-per-node=T --account=A ...] bash_train_multi_nodes.sh --config Config/config_om.yaml [...]
#   bash bash_train_multi_nodes.sh --config Config/config_om.yaml [--set key=value ...] [--fresh]
#
# Inside an allocation (sbatch, salloc) the ranks are srun tasks on all of its nodes, elsewhere processes of this host.
# All arguments go to OM_train_3modes.py, except
#   --help             print this text
#   --dry-run          build everything, print sizes and costs, and exit
#   --preflight        only check whether the allocation works (0 = yes, 43 = no); under Slurm every start checks this
#   --no-preflight     skip this check
#   --allow-tmp        let several nodes write below /tmp, for sites where that is a shared folder
#
# CLUSTER=name       settings of the site, Config/cluster/<name>.env (default: the name of the Slurm cluster if that
#                    file exists, else local)
# PYTHON=path        the interpreter (default: .venv/bin/python, else python3), or several words that start one, such as
#                    PYTHON="apptainer exec --nv omnimorph.sif python"
# RANKS=n            processes on this host, without srun (default: one per device that torch sees, 1 if there is none)
# MASTER_ADDR, MASTER_PORT   where the ranks meet (default: the first node, a free port for each round)
# PREFLIGHT_SECONDS  time limit of the preflight (default 45)
#
# A round ends with 0 (done), 42 (planned restart), 43 (stop: a person is needed) or anything else (a death: the next
# round continues from the newest checkpoint that verifies). Pauses, rounds and time limits are keys of the config
# (run.round_seconds, run.max_rounds, run.pause_*). On TERM, Ctrl-C or a closed terminal it saves, exits and does not
# restart. On USR1, which Slurm sends 480 s before the time limit, it also requeues the job if it has saved a new step,
# and the job continues from there; ranks that hang are killed in time for that. With fewer nodes than at first, a step
# keeps its samples (Runtime/global_batch.py).
#
# Paths are relative to the repository's folder; --config and --init-from may also be relative to the current one.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi  # started as `sh FILE`
set +o posix  # where sh is a bash, it reads less than as bash
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then  # below, an empty array is an unset variable
    echo "error: bash $BASH_VERSION is too old, 4.4 or newer is needed: load a newer one, or start it by its path" >&2
    exit 43
fi

asked=""
for word in "$@"; do
    case $word in
        -h | --help)
            sed -n '/^# Train until/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
            exit 0 ;;
        --dry-run | --preflight | --no-preflight) asked+=" $word" ;;
    esac
done
export TYPED_IN=$PWD
# Slurm runs a copy of this file from its spool folder.
for folder in "$(dirname "${BASH_SOURCE[0]}")" "$PWD" "${SLURM_SUBMIT_DIR:-}"; do
    [[ -f $folder/OM_train_3modes.py ]] && cd "$folder" && break
done
if [[ ! -f OM_train_3modes.py ]]; then
    echo "error: there is no OM_train_3modes.py in $PWD: submit from the repository's folder, or with --chdir=FOLDER" >&2
    exit 43
fi
# shellcheck source=/dev/null
source Scripts/settings.sh
forget_other_jobs
# srun and salloc --pty of old give one task of the job, in which an srun waits for room that never comes. Slurm numbers
# its batch and interactive steps from 4294967290 on.
if [[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} && ${SLURM_STEP_ID:-} =~ ^[0-9]{1,8}$ ]]; then
    echo "error: this shell is a task of srun itself (step $SLURM_JOB_ID.$SLURM_STEP_ID), and it cannot start others:" \
        "use sbatch or salloc, or RANKS=n for processes of this host" >&2
    exit 43
fi

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
if ! mkdir -p Logs || ! touch "$log"; then log=none; exec > >(drain)
elif [[ /dev/stdout -ef $log ]]; then exec > >(drain)  # under sbatch
else exec > >(split)
fi
speaker=$!
exec 2>&1
trap 'exec > /dev/null 2>&1; await "$speaker" 5' EXIT  # write the last output before the shell ends
say() { echo "$(date '+%F %T') $*"; }

# ---------------------------------------------------------------------------------------------------------------------
# Signals count at any time, also between rounds. What a launch consists of are commands of Supervisor/launcher.py.
# ---------------------------------------------------------------------------------------------------------------------

child="" WHY="" LEFT=""
export LEAVING=""
leave() {  # signal: remember the first one, since Slurm's TERM at the time limit follows its USR1
    LEAVING=${LEAVING:-$1}
    [[ -n $child ]] && kill -TERM "$child" 2> /dev/null
}
for name in TERM USR1 INT HUP; do
    # shellcheck disable=SC2064  # the name of now is meant
    trap "leave $name" "$name"
done

await() {  # pid, seconds: wait and set `code` to its exit code; after the seconds, kill it and set 137 at once
    local ends=$((SECONDS + $2))
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

nap() {  # seconds: sleep, but wake up for a trapped signal
    local sleeper
    sleep "$1" > /dev/null 2>&1 &
    sleeper=$!
    wait "$sleeper" || kill "$sleeper" 2> /dev/null
}

supervise() {  # seconds, command, words: set `code`, and the variables that it prints. Nothing that it prints is run
    local answer line
    exec {answer}< <(
        [[ $2 =~ ^(end|clean|tell|requeue)$ ]] && trap '' TERM INT USR1 HUP  # first this, then what they are about
        # A pipe holds 64 KiB, and is read only once the command has ended.
        exec "${supervisor[@]}" "${@:2}" > >(trap '' TERM INT USR1 HUP; mapfile lines; printf %s "${lines[@]}")
    )
    child=$! WHY="" LEFT=""
    await "$child" "$1"
    child=""
    while ((code < 128)) && IFS= read -r -t 10 -u "$answer" line; do
        [[ $line =~ ^[A-Z_]+= ]] && export "${line%%=*}=${line#*=}"
    done
    exec {answer}<&-
    LEAVING=${LEAVING:-$LEFT}
}

require() {  # command, words: `supervise` it; unless it succeeds, the launch ends
    local ends=$((SECONDS + ${OMNIMORPH_PATIENCE_S%.*}))
    while [[ -z $LEAVING ]]; do
        supervise 1000000000 "$@"
        case $code in
            0) return ;;
            42) finish 42 "left by $LEAVING$WHY; $AGAIN continues the run" ;;
            43) finish 43 "$WHY" ;;
        esac  # else somebody has killed it, or is editing it: in a run that has trained, that passes
        WHY="\"$1\" of Supervisor/launcher.py ended with exit code $code"
        ((ROUND + ${SLURM_RESTART_COUNT:-0} == 0 || SECONDS >= ends)) && finish 43 "stopped: $WHY"
        say "$WHY: tried again"
        nap 10
    done
    finish 42 "left by $LEAVING; $AGAIN continues the run"
}

finish() {  # exit code, message: end what is left, unlock the folder; near the time limit, requeue
    local said=$2
    supervise 300 clean
    [[ -f ${OMNIMORPH_RUN:-}/verdict.json ]] || said=${2%; verdict in *}  # a refused first start leaves no folder
    say "$said"
    # What a round's judge has decided, it has told already.
    [[ $1 == 43 && $2 != *verdict.json && -n ${OMNIMORPH_RUN:-}${SLURM_RESTART_COUNT:-} ]] &&
        supervise 100 tell "$2" "${words[@]}"
    if [[ $LEAVING == USR1 && $1 == 42 && -n $UNDER_SLURM ]]; then
        supervise 240 requeue
        if ((code == 43)); then
            supervise 100 tell "the job is not put back into the queue, see its log" "${words[@]}"
            exit 43
        fi
    fi
    exit "$1"
}

# ---------------------------------------------------------------------------------------------------------------------
# Nodes, settings of the site, ranks, preflight
# ---------------------------------------------------------------------------------------------------------------------

[[ -t 2 ]] || export TQDM_MININTERVAL=${TQDM_MININTERVAL:-60}  # bars in a job's log: a line a minute
unset RANK LOCAL_RANK WORLD_SIZE EXCLUDED OMNIMORPH_RUN OMNIMORPH_TOKEN OMNIMORPH_ATTEMPT OMNIMORPH_ROUND
unset OMNIMORPH_STEP OMNIMORPH_STEP_BACK OMNIMORPH_STAGE
unset SLURM_LABELIO SLURM_STDOUTMODE SLURM_STDERRMODE  # a user's: they change or redirect what srun passes on
unset "${!SQUEUE_@}"  # a user's: filters that would hide jobs and steps from us
unset SLURM_GPUS  # of sbatch --gpus: each srun, also on one node, would ask for all of them; a step gets them anyway
export OMNIMORPH_PATIENCE_S=600  # for what may pass, before the config with run.patience_s is read
AGAIN="the same command"
[[ " $* " == *" --fresh "* ]] && AGAIN+=" without --fresh"
export UNDER_SLURM="" STEP_NAME=omnimorph-$$-$RANDOM LAUNCHER_PID=$$ ROUND=0
export FIXED_ADDRESS=${MASTER_ADDR:-} FIXED_PORT=${MASTER_PORT:-}
[[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} ]] && command -v srun > /dev/null && UNDER_SLURM=1

# The launcher itself runs in Python of this host: PYTHON may be in a container, and Slurm is not.
version="import sys; print(sys.executable if sys.version_info >= (3, 6) else '')"
for candidate in python3 /usr/libexec/platform-python "${PYTHON:-.venv/bin/python}"; do
    SUPERVISOR=""
    read -r SUPERVISOR < <("$candidate" -ES -c "$version" 2> /dev/null) && [[ -n $SUPERVISOR ]] && break
done
if [[ -z $SUPERVISOR ]]; then
    echo "error: there is no python3 of version 3.6 or newer in the PATH of this host: the launcher itself needs one"
    exit 43
fi
export SUPERVISOR
supervisor=("$SUPERVISOR" -ESm Supervisor.launcher)

words=(-- "$@")
choose_site
require nodes "${words[@]}"
SITE_OPTIONS=()
load_settings  # with the profile for this number of nodes
words=("${SITE_OPTIONS[@]}" -- "$@")  # the user's come later and take precedence
export PREFLIGHT_SECONDS=${PREFLIGHT_SECONDS:-45}
require ranks "$log"

[[ $asked == *" --dry-run"* ]] && exec "${supervisor[@]}" dry-run "${words[@]}"

echo "settings (Config/cluster/$CLUSTER.env and what was set before):"
"${INTERPRETER[@]}" -m Runtime.provenance

[[ -n $UNDER_SLURM && $asked != *" --no-preflight"* || $asked == *" --preflight"* ]] &&
    require preflight "${words[@]}"
[[ $asked == *" --preflight"* ]] && finish 0 "the preflight passed"

# ---------------------------------------------------------------------------------------------------------------------
# The restart loop
# ---------------------------------------------------------------------------------------------------------------------

seconds_to_leave() {  # how long a round may go on before Slurm's time limit; nothing if that is unknown
    local left
    trap '' TERM INT USR1 HUP  # in the subshell that it runs in
    read -r -t 45 left < <(exec "${supervisor[@]}" seconds)
    [[ ${left:-} =~ ^[0-9]+$ ]] && echo "$left"
}

run_round() {  # run a round, set `code`. Near Slurm's time limit, ranks that have not left are killed
    local told="" ends="" left began=$SECONDS
    timeout --kill-after="$LEAVE_SECONDS" "$ROUND_SECONDS" "${supervisor[@]}" round "${words[@]}" &
    child=$!
    while kill -0 "$child" 2> /dev/null; do
        if [[ -n $LEAVING && -z $told ]]; then
            told=1
            kill -TERM "$child" 2> /dev/null  # the signal may have come before the child existed
            if [[ $LEAVING == USR1 && -n $UNDER_SLURM ]]; then
                left=$(seconds_to_leave)  # Slurm's TERM may follow USR1 before it can ignore that
                ends=$((SECONDS + ${left:-160}))
            fi
        fi
        if [[ -n $ends ]] && ((SECONDS >= ends)); then
            say "the ranks have not left in time before the time limit: they are ended"
            kill -KILL -- "-$child"
            ends="" began=-1000000000
        fi
        nap 0.5
    done
    await "$child" 10
    kill -KILL -- "-$child" 2> /dev/null  # ranks whose supervisor was killed would train on beside those to come
    child=""
    # Before the time limit of the round: somebody has killed its supervisor.
    [[ $code == 137 ]] && ((SECONDS - began < ${ROUND_SECONDS%.*})) && code=1
    # 143: TERM ended it before it could handle that.
    [[ -n $LEAVING && $code == 143 ]] && code=42
}

for ((ROUND = 0; ; ROUND++)); do
    require begin "${words[@]}"  # lock the folder, number the attempt
    code=42
    [[ -n $LEAVING ]] || run_round
    supervise 1000 end "$code"  # judge it
    decision=$code
    case $decision in
        0) finish 0 "done after $((ROUND + 1)) rounds" ;;
        43) finish 43 "stopped after $((ROUND + 1)) rounds; verdict in $OMNIMORPH_RUN/verdict.json" ;;
        42) pause=$PAUSE_PLANNED ;;
        *) pause=$PAUSE_CRASH ;;
    esac
    [[ -n $LEAVING ]] && finish 42 "left by $LEAVING; $AGAIN continues the run"
    ((ROUND + 1 >= MAX_ROUNDS)) && finish 43 "stopped after $MAX_ROUNDS rounds (run.max_rounds)"
    nap "$pause"
    [[ -n $UNDER_SLURM && $decision == 1 ]] && require again "${words[@]}"
done
