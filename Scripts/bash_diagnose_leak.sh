#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-leak
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=12
#SBATCH --time=00:30:00
#SBATCH --output=Logs/leak_%j.out
#
# Which part of a training step leaks memory: tests/diagnose_xpu_leak.py on one node, as a job or here.
#
#   sbatch Scripts/bash_diagnose_leak.sh
#   bash Scripts/bash_diagnose_leak.sh --scale 0.125 --device cpu     (its options; with --help a list)
#
# RANKS=N         ranks, each with a device of its own (default: the devices that torch sees; on a CPU one)
#
# Slurm writes its output into the folder Logs, which has to be there when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 nothing grows, 1 something grows with every iteration, 43 this cannot run.
set -u

stop() { echo "error: $1" >&2; exit 43; }
root=""
for folder in "$(dirname "${BASH_SOURCE[0]}")/.." "$PWD" "${SLURM_SUBMIT_DIR:-}"; do
    [[ -f $folder/OM_train_3modes.py ]] && root=$(cd "$folder" && pwd) && break
done
[[ -n $root ]] || stop "there is no OM_train_3modes.py in $PWD: submit from the repository's folder."
# shellcheck source=/dev/null
source "$root/Scripts/site.sh"
cd "$root" || exit 43
RANKS=${RANKS:-$("$PYTHON" -c "import torch; print(max(torch.accelerator.device_count(), 1))")}
export OMP_NUM_THREADS=$((OMP_NUM_THREADS > RANKS ? OMP_NUM_THREADS / RANKS : 1))
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" tests/diagnose_xpu_leak.py "$@"
