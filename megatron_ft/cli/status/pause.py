"""`megatron-ft pause` and `resume`: suspend hang detection, for a session with a debugger."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_ft.core.errors import ConfigError, FaultToleranceError
from megatron_ft.core.messages.control_messages import PauseDetection, ResumeDetection
from megatron_ft.ipc.jobs import RunningJob, find_jobs, order

_NOTHING_DONE = 1
_HELP = {
    "pause": "suspend hang detection on this node until `resume`",
    "resume": "resume hang detection; the pause counts against no timeout",
}


def add_commands(commands: Any) -> None:
    for name, text in _HELP.items():
        parser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Needed on every node of the job whose ranks are halted. "
            "Exited ranks are still detected; torch's own collective timeouts keep running.",
        )
        add_job_options(parser)
        parser.set_defaults(run=_run, order=name)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which `choose` finds the launchers."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="RUN_ID", help="the job's --rdzv-id")
    which.add_argument("--pid", type=int, metavar="LAUNCHER_PID", help="the process of this node's ft_launcher")


def choose(jobs: list[RunningJob], *, run_id: str | None, pid: int | None) -> list[RunningJob]:
    """Return the launchers that are meant: of one job, usually one on each node.

    Raises:
        ConfigError: the choice is ambiguous, or there is no such job; lists the running ones.
    """
    listed = "".join(f"; {job.describe()}" for job in jobs)
    if run_id is not None or pid is not None:
        chosen = [job for job in jobs if pid in (None, job.launcher_pid) and run_id in (None, job.run_id)]
        if not chosen:
            wanted = f"--pid {pid}" if run_id is None else f"--job {run_id}"
            raise ConfigError(f"no ft_launcher of yours on this node has {wanted}{listed}")
        return chosen
    if len(jobs) > 1:
        raise ConfigError(f"several jobs run on this node, choose one with --pid or --job{listed}")
    return jobs


def _run(args: argparse.Namespace) -> int:
    chosen = choose(find_jobs(), run_id=args.job, pid=args.pid)
    if not chosen:
        print("megatron-ft: no ft_launcher of yours runs on this node", file=sys.stderr)
        return _NOTHING_DONE
    code = 0
    for job in chosen:
        try:
            changed = order(job, PauseDetection() if args.order == "pause" else ResumeDetection())
        except FaultToleranceError as error:
            print(f"megatron-ft: {error}", file=sys.stderr)
            code = _NOTHING_DONE
            continue
        if args.order == "pause":
            done = "paused until `megatron-ft resume`" if changed else "was paused already"
        else:
            done = "resumed" if changed else "was not paused"
        print(f"{done}: {job.describe()}")
    return code
