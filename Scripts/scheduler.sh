# Sourced by bash_train_multi_nodes.sh: what the launcher asks the scheduler of its job, and how Slurm and PBS answer.
#
#   SCHEDULER       slurm, pbs, or empty outside a job, and with RANKS=n in one of Slurm's
#   JOB             the number of the job
#   job_hosts       the nodes, a line each
#   job_ends        when the time limit is reached, in seconds since 1970; nothing where that is not known
#   job_cancelled   whether a person has cancelled it
#   job_again       run this job again, from the queue
#   job_times       how often it has been in the queue before
#
# PBS sends no signal ahead of the time limit, so the launcher sets its own alarm there; and it lets only operators put
# a running job back, so a copy of the job is submitted, which waits for the end of this one.
# shellcheck shell=bash disable=SC2034  # SCHEDULER and JOB are the launcher's
SCHEDULER="" JOB=""
if [[ -n ${SLURM_JOB_ID:-} && -z ${RANKS:-} ]] && command -v srun > /dev/null; then
    SCHEDULER=slurm JOB=$SLURM_JOB_ID
elif [[ -n ${PBS_JOBID:-} && -z ${SLURM_JOB_ID:-} ]] && command -v qstat > /dev/null; then
    SCHEDULER=pbs JOB=$PBS_JOBID
fi

job_word() {  # name: print that field of what the scheduler says of this job
    case $SCHEDULER in
        slurm) timeout --kill-after=5 20 scontrol show job -o "$JOB" | grep -oE " $1=[^ ]+" | head -n 1 | cut -d= -f2 ;;
        # Long values go on in lines that begin with a tab.
        pbs) timeout --kill-after=5 20 qstat -f "$JOB" | sed -e ':a' -e 'N' -e '$!ba' -e 's/\n\t//g' \
            | sed -n "s/^ *$1 = //p" | head -n 1 ;;
    esac
}

job_hosts() {
    case $SCHEDULER in
        slurm) scontrol show hostnames "$SLURM_JOB_NODELIST" ;;
        pbs) sort -u "$PBS_NODEFILE" ;;
    esac
}

job_ends() {
    local word hours minutes seconds
    case $SCHEDULER in
        slurm)
            word=$(job_word EndTime)
            [[ -n $word ]] && date -d "$word" +%s 2> /dev/null
            ;;
        pbs)
            IFS=: read -r hours minutes seconds <<< "$(job_word Resource_List.walltime)"
            word=$(job_word stime)
            [[ -n $word && -n $seconds ]] || return
            word=$(date -d "$word" +%s 2> /dev/null) || return
            echo $((word + 3600 * 10#$hours + 60 * 10#$minutes + 10#$seconds))
            ;;
    esac
}

job_cancelled() {
    case $SCHEDULER in
        slurm) [[ $(job_word JobState) == CANCELLED* ]] ;;
        pbs) [[ $(job_word job_state) == E ]] ;;  # exiting: by qdel, as this shell still runs
    esac
}

job_times() {
    case $SCHEDULER in
        slurm) echo "${SLURM_RESTART_COUNT:-0}" ;;
        pbs) echo "${OMNIMORPH_TIMES:-0}" ;;
    esac
}

job_again() {  # the words of the launcher's command line
    local -a options=()
    local field word
    case $SCHEDULER in
        slurm) timeout --kill-after=5 20 scontrol requeue "$JOB" ;;
        pbs)
            for field in select place walltime; do
                word=$(job_word "Resource_List.$field")
                [[ -n $word ]] && options+=(-l "$field=$word")
            done
            word=$(job_word Account_Name)
            [[ -n $word ]] && options+=(-A "$word")
            word=$(job_word project)
            [[ -n $word && $word != _pbs_project_default ]] && options+=(-P "$word")
            export OMNIMORPH_TIMES=$(($(job_times) + 1))
            cd "${PBS_O_WORKDIR:-$PWD}" || return
            # The next job finds an address and a port of its own.
            timeout --kill-after=5 60 env -u MASTER_ADDR -u MASTER_PORT -u OMP_NUM_THREADS \
                qsub -V -j oe -q "$(job_word queue)" -N "$(job_word Job_Name)" "${options[@]}" \
                -W "depend=afterany:$JOB" -- /bin/bash "$@"
            ;;
    esac
}
