#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-stratB
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=96
#SBATCH --time=02:15:00
#SBATCH --output=Logs/stratB_%j.out
#
# Measure the leak rate of the training alone: the production config on one node and synthetic volumes for two hours,
# without validation, restarts, or checkpoints before the end. Each rank watches its memory and reports growth at once
# and again at the end. The training leaves early only if memory would run out.
#
#   sbatch Scripts/bash_train_stratB.sh
#   SECONDS_LONG=300 bash Scripts/bash_train_stratB.sh --set data.img_size=64     (options of OM_train_3modes.py)
#
# SECONDS_LONG=S  duration (default 7200)
# SIDE=N          voxels along each side of a synthetic volume (default 128)
# STRATB=folder   where all outputs go (default Logs/stratB)
# RANKS=N         ranks, each with a device of its own (default: one per device that torch sees, 1 on a CPU)
#
# The header asks for a node of Dawn: four cards of two tiles, 12 cores for each of the 8 ranks.
#
# Slurm writes its output to the folder Logs, which must exist when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 memory does not grow, 1 it grows, 43 no verdict (too few steps, or a driver that does not report its free
# memory), others: the training's.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
case ${1:-} in -h | --help) sed -n '/^#$/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/site.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}  # sbatch runs a copy of this file
cd "$root" || exit 43
# shellcheck source=/dev/null
source Scripts/site.sh || { echo "error: $PWD is not the repository's folder: submit from there." >&2; exit 43; }
count_ranks
folder=$(realpath -m "${STRATB:-Logs/stratB}")

side=${SIDE:-128}
data=$folder/side$side/data  # the run is named after its last part
[[ -f $data/dataset.json ]] || "${INTERPRETER[@]}" -m Dataloader.synthetic --out "$data" --count 4 --size "$side" \
    || exit 43
# So many repeats that no epoch ends: nothing is validated and nothing written.
training=("${INTERPRETER[@]}" OM_train_3modes.py --config Config/config_om.yaml "${SITE_OPTIONS[@]}"
    --fresh --max-seconds-before-restart "${SECONDS_LONG:-7200}"
    --set data.root="$data" --set data.cache= --set data.train_ids=0-3 --set data.val_ids=
    --set data.expect_samples=0 --set data.pairs=0 --set data.in_memory=true --set data.repeats=100000
    --set registration.gate=2 --set run.checkpoint_steps=0 --set run.checkpoint_minutes=0
    --set run.models="$folder/Models" --set run.logs="$folder" "$@")
port=$("${INTERPRETER[@]}" -c "from Supervisor.attempts import free_port; print(free_port())") || exit 43
touch "$folder/.began"
pids=()
trap 'kill "${pids[@]}" 2> /dev/null' INT TERM  # the ranks save and leave
for ((rank = RANKS - 1; rank >= 0; rank--)); do
    exec {out}>&1
    ((rank == 0)) || exec {out}> "$folder/rank$rank.log"
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$RANKS MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        "${training[@]}" >&"$out" 2>&1 &
    pids+=($!)
    exec {out}>&-
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid"
    ended=$?
    while ((ended > 128)) && kill -0 "$pid" 2> /dev/null; do  # a signal ended the wait, not the rank
        wait "$pid"
        ended=$?
    done
    ((ended == 0 || ended == 42)) || code=$ended
done
run=$(find "$folder/Models" -mindepth 1 -maxdepth 1 -type d -newer "$folder/.began" -printf '%T@ %p\n' 2> /dev/null \
    | sort -n | tail -n 1 | cut -d' ' -f2-)
[[ -n $run ]] || exit $((code ? code : 43))  # it was refused, see above
steps=$(grep -c '"event": "step"' "$run/rank0.jsonl")
echo "steps of rank 0: $steps"
leaks=$(grep -o '"sentence": "[^"]*"' "$run"/rank*.jsonl)
if [[ -n $leaks ]]; then
    echo "$leaks"
    exit 1
fi
((code == 0)) || exit $code
unseen=$(sed -n 's/.*"leaks not seen".*"what": "\([^"]*\)".*/\1/p' "$run"/rank*.jsonl | head -n 1)
[[ -z $unseen ]] || stop "there is no verdict: $unseen."
# The first two steps allocate, and a straight line wants 20 more (WINDOW of Runtime/memory.py).
((steps >= 22)) || stop "$steps steps are too few for a verdict: at least 22 are needed; raise SECONDS_LONG."
echo "no rank's memory grows by a MiB a step or more"
