#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-compare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=01:00:00
#SBATCH --output=Logs/compare_%j.out
#
# Compare the training step with a plain version of it: tests/compare_3modes_speed.py on one device. Before that,
# tests/test_3modes_opt_equivalence.py tests that both compute the same.
#
#   sbatch Scripts/bash_compare.sh
#   bash Scripts/bash_compare.sh --size 40 --device cpu               (options of that program; its --help lists them)
#
# Slurm writes its output to the folder Logs, which must exist when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 done, 1 the two do not compute the same, 43 this cannot run.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
case ${1:-} in -h | --help) sed -n '/^#$/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/site.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}  # sbatch runs a copy of this file
cd "$root" || exit 43
# shellcheck source=/dev/null
source Scripts/site.sh || { echo "error: $PWD is not the repository's folder: submit from there." >&2; exit 43; }
"${INTERPRETER[@]}" -c "import pytest" 2> /dev/null || stop "pytest is missing: pip install -r requirements-test.txt."
"${INTERPRETER[@]}" -m pytest -q tests/test_3modes_opt_equivalence.py || exit $(($? == 1 ? 1 : 43))
exec "${INTERPRETER[@]}" tests/compare_3modes_speed.py "$@"
