# A task of srun on its node: sets the rank's variables and the site's settings for this node, then runs its program.
# shellcheck shell=bash disable=SC1091
trap '' USR1  # it may come before Supervisor/task.py handles it
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
source Scripts/settings.sh
load_settings
[[ $1 == Scripts/preflight/preflight.py ]] && exec "${INTERPRETER[@]}" "$@"
command -v "$SUPERVISOR" > /dev/null || SUPERVISOR=python3
exec "$SUPERVISOR" -ESm Supervisor.task "$@"
