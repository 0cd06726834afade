#!/usr/bin/env bash
#SBATCH --job-name=omnimorph-verify_fix
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=12
#SBATCH --time=00:30:00
#SBATCH --output=Logs/verify_fix_%j.out
#
# Does UpsampleConv help on this device? ConvTranspose3d, which it replaced, leaks with some Intel drivers. This runs
# tests/diagnose_xpu_leak_ops.py on both, each in a process of its own.
#
#   sbatch Scripts/bash_verify_fix.sh
#   bash Scripts/bash_verify_fix.sh --scale 0.125 --device cpu        (options of that program except --only)
#
# Slurm writes its output to the folder Logs, which must exist when a job is submitted. Without a device:
# sbatch --gres=none. CLUSTER and PYTHON: see Scripts/site.sh.
#
# Exit code: 0 UpsampleConv does not leak, 1 it does, 43 this cannot run or has no verdict.
set -uo pipefail
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
case ${1:-} in -h | --help) sed -n '/^#$/,/^[^#]/{/^#/!q;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

root=$(dirname "${BASH_SOURCE[0]}")/..
[[ -f $root/Scripts/site.sh ]] || root=${SLURM_SUBMIT_DIR:-$PWD}  # sbatch runs a copy of this file
cd "$root" || exit 43
# shellcheck source=/dev/null
source Scripts/site.sh || { echo "error: $PWD is not the repository's folder: submit from there." >&2; exit 43; }

said=$(mktemp) || exit 43
trap 'rm -f "$said"' EXIT
leaks() {  # operation, options: true if it leaks. Without the sentence of a verdict, exit code 1 is a crash
    local code
    "${INTERPRETER[@]}" tests/diagnose_xpu_leak_ops.py "${@:2}" --only "$1" | tee "$said"
    code=$?
    ((code <= 1)) || exit $code
    if ! grep -q '^what grows with every iteration: ' "$said"; then
        echo "error: there is no verdict on $1: the program ended with exit code $code before it had one" >&2
        exit 43
    fi
    return $((1 - code))
}

before=no
after=no
leaks ConvTranspose3d "$@" && before=yes
leaks UpsampleConv "$@" && after=yes
case $before$after in
    yesno) echo "the fix holds: ConvTranspose3d leaks here, UpsampleConv does not" ;;
    nono) echo "neither leaks here: the fix costs nothing and is not needed with this driver" ;;
    yesyes) echo "the fix does not help: both leak here; find the operation with Scripts/bash_diagnose_ops.sh" ;;
    noyes) echo "UpsampleConv leaks here and ConvTranspose3d does not: train recmulmodmutattnnet (model.name) here" ;;
esac
[[ $after == no ]]
