#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-ops
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=00:30:00
#SBATCH --output=Logs/ops_%j.out
#
# Find the operation that leaks memory: tests/diagnose_xpu_leak_ops.py on one device, as a job or here.
#
#   sbatch Scripts/bash_diagnose_ops.sh
#   bash Scripts/bash_diagnose_ops.sh --scale 0.125 --device cpu      (options of that program; --help lists them)
#
# Slurm writes its output to the folder Logs, which must exist when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 nothing grows, 1 something grows with every iteration, 43 this cannot run or has no verdict.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules

root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/site.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}  # sbatch runs a copy of this file
cd "$root" || exit 43
# shellcheck source=/dev/null
source Scripts/site.sh || { echo "error: $PWD is not the repository's folder: submit from there." >&2; exit 43; }
conclude "${INTERPRETER[@]}" tests/diagnose_xpu_leak_ops.py "$@"
