# Chooses the site, its settings and Python. Sourced in the repository's folder by the launcher, by its ranks, and by
# site.sh for the job scripts. CLUSTER and PYTHON: see site.sh. Afterwards the array INTERPRETER starts Python.
# shellcheck shell=bash disable=SC2034
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
    set -a
    # shellcheck source=/dev/null
    source "Config/cluster/$CLUSTER.env"
    set +a
    ulimit -c 0  # no core files in the repository
    ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"
    choose_python "$PWD"
}

choose_python() {  # the repository's folder: set INTERPRETER
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python3
        [[ -x $1/.venv/bin/python ]] && PYTHON=$1/.venv/bin/python
    fi
    export PYTHON
    INTERPRETER=("$PYTHON")  # a path with blanks is one word, "apptainer exec --nv omnimorph.sif python" several
    command -v "$PYTHON" > /dev/null || read -ra INTERPRETER <<< "$PYTHON"
}
