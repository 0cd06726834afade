# Sourced by the job scripts of this folder.
#
# CLUSTER=name    settings of the site, Config/cluster/<name>.env (default: the name of the Slurm cluster if that file
#                 exists, else local)
# PYTHON=path     the interpreter (default: .venv/bin/python, else python3), or several words that start one, such as
#                 PYTHON="apptainer exec --nv omnimorph.sif python"
#
# Afterwards every variable of the site's file is exported, the array INTERPRETER starts Python, OMP_NUM_THREADS is the
# number of cores, and the array SITE_OPTIONS holds the site's training options, which precede the command line's.
# shellcheck shell=bash disable=SC2034  # SITE_OPTIONS is used by the caller
stop() { echo "error: $1" >&2; exit 43; }
count_ranks() {  # RANKS: by default one for each device that torch sees, on a CPU one; they share the cores
    RANKS=${RANKS:-$("${INTERPRETER[@]}" -c "import torch; print(max(torch.accelerator.device_count(), 1))")}
    [[ -n $RANKS ]] || stop "torch cannot count the devices, see above: set PYTHON to a Python that has torch."
    [[ $RANKS =~ ^[1-9][0-9]*$ ]] || stop "RANKS=$RANKS: give the number of processes on this host, at least 1."
    export OMP_NUM_THREADS=$((OMP_NUM_THREADS > RANKS ? OMP_NUM_THREADS / RANKS : 1))
}
conclude() {  # command of a diagnosis: run it and exit with its code, but with 43 if it ended before its verdict
    local code
    said=$(mktemp) || exit 43
    trap 'rm -f "$said"' EXIT
    "$@" | tee "$said"
    code=${PIPESTATUS[0]}  # a crash, and torch's launcher for whatever code a rank has, say 1 as a leak does
    ((code == 0)) || grep -q '^what grows with every iteration: ' "$said" || code=43
    exit "$code"
}

here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 43  # the site's files name others by their place in the repository
# shellcheck source=/dev/null
source Scripts/settings.sh
export NODE_COUNT=1
SITE_OPTIONS=()
forget_other_jobs
choose_site
unset RANK LOCAL_RANK WORLD_SIZE  # of somebody else: with RANK a site's file loads no modules
load_settings
cd "$here" || exit 43
command -v "${INTERPRETER[0]}" > /dev/null || stop "PYTHON=$PYTHON: there is no such program here or in the repository."
# A Mac has no nproc.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)}}
[[ -t 2 ]] || export TQDM_MININTERVAL=${TQDM_MININTERVAL:-60}  # bars in a job's log: a line a minute
