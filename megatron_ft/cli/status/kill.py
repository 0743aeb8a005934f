"""`megatron-ft kill`: send a signal to one rank of one job on this node, to rehearse a fault."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from megatron_ft.cli.status.pause import add_job_options, choose
from megatron_ft.core.errors import ConfigError, FaultToleranceError
from megatron_ft.ipc.jobs import RunningJob, find_jobs, running_ranks

_NOTHING_DONE = 1
_TEXT = "send a signal to one rank of a job on this node, to rehearse a fault"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "kill", help=_TEXT, description=f"{_TEXT[0].upper()}{_TEXT[1:]}. It is sent to that rank's own process only."
    )
    parser.add_argument("--rank", type=int, required=True, metavar="RANK", help="the global rank")
    parser.add_argument(
        "--signal", default="KILL", metavar="NAME", help="KILL (default), STOP, CONT, TERM, or another signal's name"
    )
    add_job_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        number = signal.Signals[f"SIG{args.signal.upper().removeprefix('SIG')}"]
    except KeyError:
        raise ConfigError(f"--signal {args.signal}: not a signal; for instance KILL, STOP, CONT or TERM") from None
    jobs = choose(find_jobs(), run_id=args.job, pid=args.pid)
    if not jobs:
        print("megatron-ft: no ft_launcher of yours runs on this node", file=sys.stderr)
        return _NOTHING_DONE
    try:
        pid = _pid_of(args.rank, jobs)
        process = os.pidfd_open(pid)
        try:
            # the id may have become another process's since the launcher named it; it can't any more
            if _pid_of(args.rank, jobs) != pid:
                raise ProcessLookupError
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
    except ConfigError:
        raise
    except (FaultToleranceError, ProcessLookupError) as error:
        print(f"megatron-ft: {error or f'rank {args.rank} has exited'}", file=sys.stderr)
        return _NOTHING_DONE
    print(f"sent {number.name} to rank {args.rank} (process {pid}): {jobs[0].describe()}")
    return 0


def _pid_of(rank: int, jobs: Sequence[RunningJob]) -> int:
    """Raises ConfigError: the job has no such rank that runs on this node."""
    pids = {row.rank: row.pid for job in jobs for row in running_ranks(job)}
    if rank not in pids:
        there = ", ".join(map(str, sorted(pids))) or "none"
        raise ConfigError(f"--rank {rank}: not a rank that runs on this node; those of {jobs[0].run_id} here: {there}")
    return pids[rank]
