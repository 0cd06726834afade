#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-ops
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=00:30:00
#SBATCH --output=Logs/ops_%j.out
#
# Which operation leaks memory: tests/diagnose_xpu_leak_ops.py on one device, as a job or here.
#
#   sbatch Scripts/bash_diagnose_ops.sh
#   bash Scripts/bash_diagnose_ops.sh --scale 0.125 --device cpu      (its options; with --help a list)
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
exec "$PYTHON" tests/diagnose_xpu_leak_ops.py "$@"
