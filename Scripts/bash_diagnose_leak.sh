#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-leak
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=48
#SBATCH --time=00:30:00
#SBATCH --output=Logs/leak_%j.out
#
# Find the part of a training step that leaks memory: tests/diagnose_xpu_leak.py on one node, as a job or here.
#
#   sbatch Scripts/bash_diagnose_leak.sh
#   bash Scripts/bash_diagnose_leak.sh --scale 0.125 --device cpu     (options of that program; --help lists them)
#
# The header asks for half a node of Dawn: two cards of two tiles, 12 cores for each of the 4 ranks.
#
# RANKS=N         ranks, each with a device of its own (default: one per device that torch sees, 1 on a CPU)
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
count_ranks
conclude "${INTERPRETER[@]}" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
    tests/diagnose_xpu_leak.py "$@"
