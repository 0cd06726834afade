#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=12
#SBATCH --time=01:00:00
#SBATCH --output=Logs/smoke_%j.out
#
# Smoke ladder, before a campaign on a new cluster: four small trainings show step by step how much of it works.
#
#   bash Scripts/bash_smoke.sh [--scale S] [--steps N] [--only 01 02 03 04] [--device D] [--seconds N] [--no-slurm]
#
#   01  one device, a plain MLP                 02  two ranks of this host, DDP
#   03  two ranks of this host, ZeRO-1          04  several nodes, ZeRO-1
#
# --scale S     shrinks the widths, e.g. 0.05 for a CPU (default 1: 25 M, 101 M, 805 M and 1074 M parameters)
# --steps N     training steps of each (default 100)
# --device D    auto, cpu, cuda or xpu (default auto)
# --seconds N   time limit for each step of the ladder (default 900)
# --no-slurm    run 04 on this host too, with two ranks
#
# 03 and 04 need DeepSpeed: pip install -r requirements-smoke.txt
# Inside an allocation, 04 uses srun on all nodes, one task per device (two per node on CPUs). Outside, it submits
# itself on two nodes with two devices each and waits. To run all steps on compute nodes: sbatch Scripts/bash_smoke.sh
# (without devices: sbatch --gres=none Scripts/bash_smoke.sh --device cpu)
#
# SMOKE_SBATCH="--partition=gpu --gres=gpu:4"   more options for that job; SMOKE_QUEUE_SECONDS (3600): its longest wait
# SMOKE_LOGS=folder   for logs, and during a step checkpoints of up to 15 GB; all nodes must see it (default Logs/smoke)
# MASTER_ADDR         where the nodes of 04 meet, if not at the first host's name
# CLUSTER and PYTHON  see Scripts/site.sh
#
# Exit code: 0 all requested steps passed, 1 one of them failed, 43 this command cannot run.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
case ${1:-} in -h | --help) sed -n '/^# Smoke/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/smoke/ladder.py ]] || root=${SLURM_SUBMIT_DIR:-.}  # sbatch runs a copy of this file
cd "$root" || exit 43

only=()
options=()
seconds=900
slurm=yes
stop() { echo "error: $1" >&2; exit 43; }
while (($#)); do
    case $1 in
        --only)
            while [[ ${2:-} =~ ^0[1-4]$ ]]; do only+=("$2"); shift; done
            ((${#only[@]})) || stop "--only takes steps of the ladder: 01 02 03 04." ;;
        --no-slurm) slurm="" ;;
        --scale | --steps | --device | --seconds)
            [[ -n ${2:-} ]] || stop "$1 needs a value."
            options+=("$1" "$2")
            [[ $1 == --seconds ]] && seconds=$2
            shift ;;
        *) stop "$1 is unknown; see the head of Scripts/bash_smoke.sh." ;;
    esac
    shift
done
((${#only[@]})) || only=(01 02 03 04)
export NODE_COUNT=1
# shellcheck source=/dev/null
source Scripts/settings.sh
forget_other_jobs
choose_site
unset RANK LOCAL_RANK WORLD_SIZE  # of somebody else: with RANK a site's file loads no modules
load_settings
ladder=("${INTERPRETER[@]}" Scripts/smoke/ladder.py "${options[@]}")
host=$("${ladder[@]}" --host) || exit 43
read -r kind devices port <<< "$host"
cores=$((($(nproc) + 1) / 2))
# SMOKE_FOLDER is set for the job that 04 submits: it writes into the folder of who submitted it.
folder=${SMOKE_FOLDER:-$(realpath -m "${SMOKE_LOGS:-Logs/smoke}")/$(date +%Y%m%d-%H%M%S)-$$}
mkdir -p "$folder" || exit 43

job=""
# shellcheck disable=SC2317,SC2329  # called by the trap
leave() {
    jobs -p | xargs --no-run-if-empty kill 2> /dev/null
    [[ -n $job ]] && scancel "$job" 2> /dev/null
}
trap leave EXIT
trap 'exit 1' INT TERM

# ---------------------------------------------------------------------------------------------------------------------
# The steps: each returns 0, or sets `reason`. A rank that fails leaves <step>.rank<n>.error: time, rank, reason.
# ---------------------------------------------------------------------------------------------------------------------

run_here() {  # step, ranks: plain processes of this host
    local step=$1 count=$2 rank code until="" ended=0 left=$2
    local -a pids=()
    if [[ $kind != cpu ]] && ((count > devices)); then
        reason="needs $count devices and torch sees $devices here; --device cpu tries it without"
        return 1
    fi
    for ((rank = 0; rank < count; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$count MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} timeout --kill-after=10 "$seconds" \
            "${ladder[@]}" --step "$step" --folder "$folder" > "$folder/$step.rank$rank.log" 2>&1 &
        pids[rank]=$!
    done
    while ((left > 0)); do
        sleep 0.1 & wait $!
        for rank in "${!pids[@]}"; do
            kill -0 "${pids[rank]}" 2> /dev/null && continue
            wait "${pids[rank]}"
            code=$?
            unset "pids[rank]"
            left=$((left - 1))
            if ((code != 0 && ended == 0)); then last_word "$step" "$rank" "ended with exit code $code"; fi
        done
        [[ -z $until ]] && compgen -G "$folder/$step.rank*.error" > /dev/null && until=$((SECONDS + 2))
        if [[ -n $until ]] && ((SECONDS > until && left > 0 && ended == 0)); then
            ended=1
            kill "${pids[@]}"
        fi
    done
    failed_ranks "$step"
}

last_word() {  # step, rank, what: for a rank that could not say it itself. Its death is older than the errors of others
    local error=$folder/$1.rank$2.error end
    [[ -e $error ]] && return
    end=$(tail -n 1 "$folder/$1.rank$2.log")
    case $3 in
        *124) echo "$(date +%s) rank $2 has not ended within $seconds s; its stack is in its log" ;;
        *) echo "0 rank $2 $3${end:+; its log ends: $end}" ;;
    esac > "$error"
}

failed_ranks() {  # step: true if none; sets `reason` to the first
    reason=$(cat "$folder/$1".rank*.error 2> /dev/null | sort -n | head -n 1 | cut -d' ' -f2-)
    [[ -z $reason ]]
}

run_srun() {  # 04 on all nodes of this allocation
    local nodes=${SLURM_JOB_NUM_NODES:-1} first address tasks code
    local -a cpus=()
    if ((nodes < 2)); then
        reason="the allocation has one node; take two: salloc --nodes=2 --ntasks-per-node=<devices> ..., or sbatch"
        return 1
    fi
    NODE_COUNT=$nodes
    load_settings
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=${MASTER_ADDR:-$first}
    if ! getent hosts "$address" > /dev/null; then  # Slurm knows where its nodes are
        address=$(scontrol show node -o "$first" | grep -oE 'NodeAddr=[^ ]+' | cut -d= -f2)
    fi
    unset SLURM_LABELIO SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_GPUS  # see bash_train_multi_nodes.sh
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # all that 22.05 reads
        cpus=(--cpus-per-task="$SLURM_CPUS_PER_TASK")  # 23.11 wants it if SLURM_TRES_PER_TASK has another number
    fi
    if ! host=$(timeout --kill-after=10 120 srun --overlap --nodes=1 --ntasks=1 "${cpus[@]}" --nodelist="$first" \
        "${ladder[@]}" --host 2> "$folder/04.srun.log" < /dev/null); then
        reason="srun cannot run a task on $first: $(tail -n 1 "$folder/04.srun.log")"
        return 1
    fi
    read -r kind devices port <<< "$host"
    tasks=$devices
    [[ $kind == cpu ]] && tasks=2
    MASTER_ADDR=$address MASTER_PORT=${MASTER_PORT:-$port} timeout --kill-after=30 $((seconds + 60)) \
        srun --overlap --overcommit --kill-on-bad-exit=1 --export=ALL "${cpus[@]}" \
        --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" --output="$folder/04.rank%t.log" \
        bash -c 'source Scripts/settings.sh; load_settings; exec "$@"' task timeout --kill-after=10 "$seconds" \
        "${ladder[@]}" --step 04 --folder "$folder" 2> "$folder/04.srun.log" &
    wait $!
    code=$?
    # srun begins with the task that ended first.
    if [[ $(grep -m 1 ': task' "$folder/04.srun.log") =~ error:\ (.*):\ tasks?\ ([0-9]+).*:\ (.*) ]]; then
        last_word 04 "${BASH_REMATCH[2]}" "on ${BASH_REMATCH[1]}: ${BASH_REMATCH[3]}"
    fi
    failed_ranks 04 || return 1
    ((code == 0)) || reason="srun ended with exit code $code: $(head -n 1 "$folder/04.srun.log")"
    ((code == 0))
}

run_sbatch() {  # 04 as a job of its own; what it says becomes ours
    local words minutes=$((2 * seconds / 60 + 5)) code needs=(--gres=gpu:2 --cpus-per-task=12)
    [[ " ${options[*]} " == *" --device cpu "* ]] && needs=()
    words=$(printf '%q ' bash Scripts/bash_smoke.sh --only 04 "${options[@]}")
    # shellcheck disable=SC2086  # several options in one variable
    SMOKE_FOLDER=$folder timeout "${SMOKE_QUEUE_SECONDS:-3600}" sbatch --wait --parsable --job-name=omnimorph-smoke \
        --nodes=2 --ntasks-per-node=2 --time="$minutes" --output="$folder/04.job.log" "${needs[@]}" ${SMOKE_SBATCH:-} \
        --wrap "$words" > "$folder/04.job" 2> "$folder/04.sbatch.log" &
    local pid=$!
    while kill -0 $pid 2> /dev/null && [[ ! -s $folder/04.job ]]; do sleep 0.1; done
    job=$(cut -d';' -f1 "$folder/04.job")
    [[ -n $job ]] && echo "04 is job $job now; waiting for it (Ctrl-C cancels the job)"
    wait $pid
    code=$?
    if [[ -s $folder/04.job.log ]]; then sed "s/^/  job $job | /" "$folder/04.job.log"; fi
    if ((code != 0)); then
        reason="job ${job:-none}: $(cat "$folder"/04.{sbatch,job}.log 2> /dev/null | tail -n 1) (exit code $code)"
        [[ -s $folder/04.failed ]] && reason=$(cut -d' ' -f3- "$folder/04.failed")
    fi
    if ((code == 124)); then
        reason="job ${job:-none} was not done within ${SMOKE_QUEUE_SECONDS:-3600} s (SMOKE_QUEUE_SECONDS)"
        [[ -n $job ]] && scancel "$job"
    fi
    job=""
    return $code
}

run_step() {
    case $1 in
        01) run_here 01 1 ;;
        02 | 03) run_here "$1" 2 ;;
        04)
            if [[ -z $slurm ]]; then run_here 04 2
            elif [[ -n ${SLURM_JOB_ID:-} ]] && command -v srun > /dev/null; then run_srun
            elif command -v sbatch > /dev/null && timeout 30 sinfo > /dev/null 2>&1; then run_sbatch
            else run_here 04 2; fi ;;
    esac
}

# ---------------------------------------------------------------------------------------------------------------------
# The ladder
# ---------------------------------------------------------------------------------------------------------------------

show_ends() {  # step: the last lines of the first two ranks that failed
    local rank
    for rank in $(cat "$folder/$1".rank*.error 2> /dev/null | sort -n | head -n 2 | cut -d' ' -f3); do
        [[ -s $folder/$1.rank$rank.log ]] || continue
        echo "  $folder/$1.rank$rank.log ends:"
        tail -n 12 "$folder/$1.rank$rank.log" | sed 's/^/  | /'
    done
}

exit_code=0
[[ -n ${SMOKE_FOLDER:-} ]] || echo "$(date '+%F %T') smoke ladder on $(hostname), $kind, logs in $folder"
for step in "${only[@]}"; do
    reason=""
    if ! run_step "$step" || ! grep "^PASSED $step" "$folder/$step.rank0.log"; then
        exit_code=1
        [[ -s $folder/04.job.log ]] || show_ends "$step"
        echo "FAILED $step ${reason:-rank 0 has not said PASSED}" | tee "$folder/$step.failed"
    fi
    rm -rf "$folder/$step.checkpoint"
done
[[ -n ${SMOKE_FOLDER:-} ]] || "${ladder[@]}" --folder "$folder" --table "${only[@]}"
exit $exit_code
