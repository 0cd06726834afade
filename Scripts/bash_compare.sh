#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-compare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=01:00:00
#SBATCH --output=Logs/compare_%j.out
#
# The training step as it is against the same step written plainly: tests/compare_3modes_speed.py on one device. That
# both compute the same is tested by tests/test_3modes_opt_equivalence.py, which runs first.
#
#   sbatch Scripts/bash_compare.sh
#   bash Scripts/bash_compare.sh --size 40 --device cpu               (its options; with --help a list)
#
# Slurm writes its output into the folder Logs, which has to be there when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 done, 1 the two do not compute the same, 43 this cannot run.
set -u
case ${1:-} in -h | --help) sed -n '/^#$/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/site.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}  # sbatch runs a copy of this file
cd "$root" && root=$PWD
# shellcheck source=/dev/null
source Scripts/site.sh || { echo "error: $PWD is not the repository's folder: submit from there." >&2; exit 43; }
"${INTERPRETER[@]}" -m pytest -q tests/test_3modes_opt_equivalence.py || exit 1
exec "${INTERPRETER[@]}" tests/compare_3modes_speed.py "$@"
