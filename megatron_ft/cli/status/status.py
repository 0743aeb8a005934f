"""`megatron-ft status`: state of the ranks of this node's jobs, live, once, or for a script."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from msgspec.structs import asdict

from megatron_ft.cli.base.terminal import follow, terminal
from megatron_ft.cli.slurm.batch import status_on_nodes
from megatron_ft.cli.status.job_directory import print_job
from megatron_ft.cli.status.jobs import RunningJob, SilentError, choose, facts_of, find_jobs
from megatron_ft.cli.status.status_table import job_frame
from megatron_ft.errors import ConfigError, FaultToleranceError
from megatron_ft.link.base.codec import to_builtins
from megatron_ft.link.base.wording import printable
from megatron_ft.link.messages.job_facts import JobFacts

_NOTHING_SEEN = 1
_INTERRUPTED = 130
_REDRAW_S = 0.5
_NONE_HERE = (
    "no ft_launcher of yours runs on this node; for a job on other nodes: megatron-ft status JOB_DIR (the directory "
    "that ft_launcher names as 'logs:'), or megatron-ft status --slurm JOBID"
)
_TEXT = "show where the ranks of this node's jobs are now, and how much of their timeouts is used"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help=_TEXT,
        description=f"{_TEXT[0].upper()}{_TEXT[1:]}. In a terminal it is redrawn until Ctrl-C or the end of the jobs; "
        "the jobs aren't affected. The exit code is 1 if no job runs, or one doesn't answer.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "log_dir",
        metavar="JOB_DIR",
        nargs="?",
        help="the whole job, on all its nodes: from the event logs in this directory, which ft_launcher names as "
        "'logs:', on any host that reaches it",
    )
    which.add_argument("--job", metavar="RUN_ID", help="only the job with this --rdzv-id")
    which.add_argument("--pid", type=int, metavar="LAUNCHER_PID", help="only the job of this ft_launcher")
    which.add_argument(
        "--slurm", type=int, metavar="JOBID", help="on every node of that job of Slurm's, once, by srun --overlap"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print once and end, as it does where there is no terminal")
    how.add_argument("--json", action="store_true", help="print once, for scripts; times are seconds")
    how.add_argument(
        "--pids", action="store_true", help="print the process ids of one job's ranks on this node, one line per rank"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.slurm is not None:
        return status_on_nodes(args.slurm, "--json" if args.json else "--pids" if args.pids else "--once")
    if args.log_dir is not None:
        if args.pids:
            raise ConfigError(
                "--pids: for a job on this node (--job, --pid) or of Slurm (--slurm), not for a directory"
            )
        if print_job(args.log_dir, as_json=args.json, once=args.once):
            return 0
        print(f"megatron-ft: no event logs of a launcher in {args.log_dir}", file=sys.stderr)
        return _NOTHING_SEEN
    is_one = args.job is not None or args.pid is not None or args.pids
    jobs = choose(find_jobs(), run_id=args.job, pid=args.pid) if is_one else find_jobs()
    if not jobs:
        print(f"megatron-ft: {_NONE_HERE}", file=sys.stderr)
    answered: list[tuple[RunningJob, JobFacts]] = []
    try:
        for job in jobs:
            try:
                answered.append((job, facts_of(job)))
            except FaultToleranceError as error:
                print(f"megatron-ft: {error}", file=sys.stderr)
        _print(answered, args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # `| head` has read enough; write nothing more, not even at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOTHING_SEEN
    return 0 if jobs and len(answered) == len(jobs) else _NOTHING_SEEN


def _print(answered: list[tuple[RunningJob, JobFacts]], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"jobs": [job_object(facts) for _, facts in answered]}, indent=2), flush=True)
        return
    if args.pids:
        rows = [row for _, facts in answered for row in facts.ranks if row.exit_code is None]
        for row in sorted(rows, key=lambda row: row.rank):
            print(row.rank, row.pid, flush=True)
        return
    from rich.console import Group

    console, running = terminal(), dict(enumerate(answered))

    def frame() -> tuple[Group, bool]:
        """Ask the launchers; those that are gone are told of once, and left out."""
        frames = []
        for number, (job, _) in list(running.items()):
            doubt = None
            try:
                running[number] = job, facts_of(job)
            except SilentError as error:
                doubt = f"{error}: the values shown may be out of date"
            except FaultToleranceError:
                del running[number]
                gone = f"ft_launcher {job.launcher_pid} has exited or no longer answers"
                console.print(f"job {printable(job.run_id)}: {gone}", markup=False)
                continue
            frames.append(job_frame(running[number][1], doubt, width=console.width))
        return Group(*frames), bool(running)

    if answered and console.is_terminal and not console.is_dumb_terminal and not args.once:
        follow(frame, _REDRAW_S, console=console)
    elif answered:
        console.print(frame()[0])


def job_object(facts: JobFacts) -> dict[str, Any]:
    """Return one job, for scripts. The keys are in docs/report.md; times are seconds; null is none or unknown."""
    job: dict[str, Any] = to_builtins(asdict(facts))
    now_ns, job["reported_hangs"] = job.pop("now_ns"), job.pop("hangs")
    for of, name in (("started_ns", "uptime_s"), ("cycle_started_ns", "cycle_s"), ("paused_since_ns", "paused_s")):
        then_ns = job.pop(of)
        job[name] = None if then_ns is None else max(0, now_ns - then_ns) / 1e9
    for row, told in zip(facts.ranks, job["ranks"], strict=True):
        if row.timeout is not None:
            told["timeout"]["share"] = row.timeout.share
    return job
