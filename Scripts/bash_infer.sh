#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-infer
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --output=Logs/infer_%j.out
#
# Run the programs before and after the training as a job: one process, on one device if the task can use it.
#
#   sbatch Scripts/bash_infer.sh register --pairs pairs.json --model Models/all_om_net --out Results/run
#   sbatch Scripts/bash_infer.sh augment --data Data/all --model Models/all_om_net --out Results/augmented
#   sbatch --gres=none Scripts/bash_infer.sh prepare --config Config/config_om.yaml --set data.root=/data/brains
#   sbatch --gres=none Scripts/bash_infer.sh evaluate --pairs scored.json --out Results/scores
#
#   sbatch --array=1-20 Scripts/bash_infer.sh register --pairs pairs.csv --out Results/run
#
# In an array from 1 to N, each job registers every N-th pair (--part); the same command without --array joins their
# results and registers what is missing.
#
# The words after the task go to OM_prepare.py, OM_register.py, OM_augment.py or OM_evaluate.py (each has --help). In a
# job with a device, augment with a network uses it (--device auto). prepare, evaluate and augment without a network
# cannot use one: submit them with --gres=none and more --cpus-per-task. Slurm writes its output to the folder Logs,
# which must exist when a job is submitted. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: that of the program (0 done, 43 bad input), 43 if this command cannot run.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
case ${1:-} in -h | --help) sed -n '/^#$/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

# Paths on the command line are those of where it was typed; Slurm runs a copy of this file from its spool folder.
root=""
for folder in "$(dirname "${BASH_SOURCE[0]}")/.." "$PWD" "${SLURM_SUBMIT_DIR:-}" "${SLURM_SUBMIT_DIR:-}/.."; do
    [[ -f $folder/OM_train_3modes.py ]] && root=$(cd "$folder" && pwd) && break
done
stop() { echo "error: $1" >&2; exit 43; }
[[ -n $root ]] || stop "there is no OM_train_3modes.py in $PWD: submit from the repository's folder."

task=${1:-}
case $task in
    prepare | register | augment | evaluate) program=$root/OM_$task.py ;;
    "") stop "name a task: prepare, register, augment or evaluate, then its options; see Scripts/bash_infer.sh." ;;
    *) stop "$task is no task: it is prepare, register, augment or evaluate; see the head of Scripts/bash_infer.sh." ;;
esac
shift

# shellcheck source=/dev/null
source "$root/Scripts/site.sh"

has() { [[ " ${*:2} " == *" $1 "* || " ${*:2}" == *" $1="* ]]; }  # option, words: given, in either form

if [[ -n ${SLURM_JOB_GPUS:-} || ${SLURM_GPUS_ON_NODE:-0} != 0 ]]; then
    if [[ $task == prepare || $task == evaluate ]] \
        || { [[ "$task $* " =~ ^augment.*" --model"[\ =]"none " ]] && ! has --register "$@"; }; then
        echo "$task has no use for the device that this job holds: submit it with --gres=none" >&2
    elif [[ $task == augment ]] && ! has --device "$@"; then
        set -- "$@" --device auto
    fi
fi

if [[ $task == register && -n ${SLURM_ARRAY_TASK_ID:-} ]] && ! has --part "$@"; then
    [[ ${SLURM_ARRAY_TASK_MIN:-} == 1 && ${SLURM_ARRAY_TASK_COUNT:-} == "${SLURM_ARRAY_TASK_MAX:-}" ]] \
        || stop "the jobs of an array are numbered from 1 without gaps: submit it with --array=1-N, or give --part K/N."
    set -- "$@" --part "$SLURM_ARRAY_TASK_ID/${SLURM_ARRAY_TASK_MAX:-}"
fi

job=${SLURM_JOB_ID:+, job $SLURM_JOB_ID}
echo "$(date '+%F %T') $task on $(hostname), $OMP_NUM_THREADS threads, settings of $CLUSTER$job" >&2
# In place of this shell: signals reach the program, and its exit code is the job's.
exec "${INTERPRETER[@]}" "$program" "$@"
