# Chooses the site, its settings and Python. Sourced in the repository's folder by the launcher, by its ranks, and by
# site.sh for the job scripts. CLUSTER and PYTHON: see site.sh. Afterwards the array INTERPRETER starts Python.
# shellcheck shell=bash disable=SC2034
forget_other_jobs() {  # sbatch passes on the variables of a job in which it is called; Slurm replaces most of them
    local shown
    # With _TYPE it is of a step, whose cores are not ours; what a user sets has none.
    [[ -n ${SLURM_CPU_BIND_TYPE:-} ]] && unset "${!SLURM_CPU_BIND@}"
    [[ -n ${SLURM_MEM_BIND_TYPE:-} ]] && unset "${!SLURM_MEM_BIND@}"
    [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_ARRAY_JOB_ID:-}${SLURM_RESTART_COUNT:-}${SLURM_STEP_ID:-} ]] || return
    # In a container without Slurm, and while Slurm does not answer, all of them stay.
    shown=$(timeout 30 scontrol show job -o "$SLURM_JOB_ID" 2> /dev/null | grep "^JobId=$SLURM_JOB_ID ") || return
    [[ $shown == *" ArrayJobId=${SLURM_ARRAY_JOB_ID:-none} "* ]] || unset "${!SLURM_ARRAY_@}"
    [[ $shown == *" Restarts=0 "* ]] && unset SLURM_RESTART_COUNT
    [[ -z ${SLURM_STEP_ID:-} ]] && return
    timeout 30 scontrol show step -o "$SLURM_JOB_ID.$SLURM_STEP_ID" 2> /dev/null | grep -q StepId= ||
        unset SLURM_STEP_ID
}

choose_site() {  # set CLUSTER
    local known
    if [[ -z ${CLUSTER:-} ]]; then
        CLUSTER=local
        [[ -f Config/cluster/${SLURM_CLUSTER_NAME:-}.env ]] && CLUSTER=$SLURM_CLUSTER_NAME
    fi
    export CLUSTER
    [[ -f Config/cluster/$CLUSTER.env ]] && return
    known=$(cd Config/cluster && ls -- *.env)
    echo "error: CLUSTER=$CLUSTER: there is no Config/cluster/$CLUSTER.env; known are ${known//$'\n'/, }." >&2
    exit 43
}

load_settings() {  # read the site's file and export all its variables; NODE_COUNT chooses between its profiles
    local flags=$-
    set +u -a  # the file, and modules that it loads, may ask for variables that are not set, such as LD_LIBRARY_PATH
    # shellcheck source=/dev/null
    source "Config/cluster/$CLUSTER.env"
    set +a
    [[ $flags == *u* ]] && set -u
    ulimit -c 0  # no core files in the repository
    ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
    ulimit -f "$(ulimit -Hf)"
    choose_python "$PWD"
}

choose_python() {  # the repository's folder: set INTERPRETER
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python3
        [[ -x $1/.venv/bin/python ]] && PYTHON=.venv/bin/python
    fi
    # Absolute, since a job script returns to the folder where it was typed.
    [[ $PYTHON == [^/]*/* && -x $1/$PYTHON ]] && PYTHON=$1/$PYTHON
    export PYTHON
    INTERPRETER=("$PYTHON")  # a path with blanks is one word, "apptainer exec --nv omnimorph.sif python" several
    command -v "$PYTHON" > /dev/null || read -ra INTERPRETER <<< "$PYTHON"
}
