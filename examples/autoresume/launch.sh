#!/usr/bin/env bash
# Auto-resume: starts one job after the other until the training is finished.
#
#     export FAULT_TOL_FINISHED_FLAG_FILE=/checkpoints/finished
#     examples/autoresume/launch.sh ft_launcher --nproc-per-node 8 --max-restarts 3 train.py --save /checkpoints
#
# The arguments are the command of a job, on a machine without a scheduler. Under Slurm the batch script's body is
# `megatron-ft slurm` (docs/slurm.md), which knows what srun and the time limit do to a job.
# Each job goes on from the last checkpoint. One that finishes the training writes the file that
# FAULT_TOL_FINISHED_FLAG_FILE names: examples/autoresume/train.py does so itself, and with autoresume=True the
# Lightning callbacks do (examples/lightning_gpt.py). ft_launcher restarts ranks within a job; this starts a new job
# when ft_launcher itself has given up or was killed, or when a job has used up its time.
#
# A job ends ...      and then
# with the flag       the training is over
# with exit code 0    the next one goes on: it was stopped on purpose, e.g. by Lightning's max_time
# with exit code 2    nothing more is tried: the command line or the configuration has to be corrected first
# with exit code 93   nothing more is tried: it failed again and again and got no further
# with exit code 94   the next one goes on at once, and it doesn't count as a failure: the script did nothing wrong, but
#                     too many nodes were lost, or didn't come, for ft_launcher to go on within this job
# with another        it has failed: the next one goes on, until MAX_FAILURES (3) is reached
#
# At most MAX_JOBS (100) jobs are run, so that a training that never writes the flag doesn't go on for ever. SIGTERM,
# SIGINT and SIGHUP are passed on to the job, and no other is started.
#
# Exit code: 0 the training is finished; that of the last job if it failed; 1 too many jobs; 2 a mistake; 93 no
# progress; 128 + n stopped by signal n.
set -uo pipefail
set -m # jobs get a process group of their own: Ctrl-C then reaches them once, through the trap below

say() { printf '[launch.sh] %s\n' "$*" >&2; }

flag=${FAULT_TOL_FINISHED_FLAG_FILE:-}
max_failures=${MAX_FAILURES:-3}
max_jobs=${MAX_JOBS:-100}
no_restart=${NO_RESTART_EXIT_CODE:-93}
if [[ -z $flag || $# -eq 0 || ! $max_failures =~ ^[0-9]+$ || ! $max_jobs =~ ^[0-9]+$ ]]; then
    say "usage: FAULT_TOL_FINISHED_FLAG_FILE=FILE [MAX_FAILURES=3] [MAX_JOBS=100] $0 COMMAND..."
    exit 2
fi
export FAULT_TOL_FINISHED_FLAG_FILE

if [[ -e $flag ]]; then
    say "nothing to do: $flag says: $(head -n 1 "$flag") (remove it to train again)"
    exit 0
fi

stopped_by=
passed_on=
job_pid=
stop() {
    stopped_by=$1
    if [[ -n $job_pid ]]; then
        passed_on=$1
        say "passing SIG$1 on to the job"
        kill -s "$1" "$job_pid"
    fi
}
trap 'stop TERM' TERM
trap 'stop INT' INT
trap 'stop HUP' HUP

failures=0
for ((job = 1; job <= max_jobs; job++)); do
    say "job $job starts"
    "$@" &
    job_pid=$!
    # the signal may have come when there was a job, and not yet its number
    [[ $stopped_by == "$passed_on" ]] || stop "$stopped_by"
    # A signal to this script ends `wait`, but not the job, which may have something to save.
    while
        wait "$job_pid"
        code=$?
        kill -0 "$job_pid" 2>/dev/null
    do :; done
    job_pid=

    if [[ -e $flag ]]; then
        say "job $job ended with exit code $code, and $flag says: $(head -n 1 "$flag")"
        exit "$code"
    fi
    if [[ -n $stopped_by ]]; then
        say "stopped by SIG$stopped_by; job $job ended with exit code $code; the training isn't finished"
        exit $((128 + $(kill -l "$stopped_by")))
    fi
    case $code in
    0) say "job $job ended well; there is more to train" ;;
    2)
        say "job $job ended with exit code 2, a mistake that another job would meet again"
        exit 2
        ;;
    "$no_restart")
        say "job $job ended with exit code $code: it gets no further, and another job wouldn't either"
        exit "$code"
        ;;
    94) say "job $job ended with exit code 94: the job couldn't go on, and can be started again" ;;
    *)
        failures=$((failures + 1))
        say "job $job failed with exit code $code: failure $failures of at most $max_failures"
        if ((failures >= max_failures)); then
            exit "$code"
        fi
        ;;
    esac
done
say "$max_jobs jobs, and the training isn't finished"
exit 1
