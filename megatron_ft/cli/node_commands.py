"""`megatron-ft pause`, `resume`, `stacks`, `kill`: commands for the jobs of this user on this node."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatron_ft.cli.status.jobs import RunningJob, choose, find_jobs, order, running_ranks, show_rank
from megatron_ft.config.kinds import SIGNAL
from megatron_ft.errors import ConfigError, FaultToleranceError
from megatron_ft.link.messages.monitor_messages import Pause, Resume

_NOTHING_DONE = 1
_ON_EACH_NODE = (
    "Needed on every node of the job whose ranks are halted. Exited ranks are still detected; torch's own collective "
    "timeouts keep running."
)


def add_commands(commands: Any) -> None:
    pause = functools.partial(_order, Pause(), "paused until `megatron-ft resume`", "was paused already")
    resume = functools.partial(_order, Resume(), "resumed", "was not paused")
    _add(commands, "pause", "suspend hang detection on this node until `resume`", _ON_EACH_NODE, pause)
    _add(commands, "resume", "resume hang detection; the pause counts against no timeout", _ON_EACH_NODE, resume)
    parser = _add(
        commands,
        "stacks",
        "print what the ranks of a job do now, on this node: stack, section, collectives in flight",
        "The ranks get no signal: a thread of each answers. The exit code is 1 if a rank can't be shown.",
        _stacks,
    )
    parser.add_argument("--rank", type=int, metavar="RANK", help="only this (global) rank")
    parser = _add(
        commands,
        "kill",
        "send a signal to one rank of a job on this node, to rehearse a fault",
        "It is sent to that rank's own process only.",
        _kill,
    )
    parser.add_argument("--rank", type=int, required=True, metavar="RANK", help="the global rank")
    parser.add_argument(
        "--signal", default="KILL", metavar="NAME", help="KILL (default), STOP, CONT, TERM, or another signal's name"
    )


def _add(
    commands: Any, name: str, text: str, more: str, act: Callable[[list[RunningJob], argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a command; ``act`` is called with the jobs that the user means, of which there is at least one."""

    def run(args: argparse.Namespace) -> int:
        if "signal" in args:
            args.signal = SIGNAL.parse("--signal", args.signal)
        jobs = choose(find_jobs(), run_id=args.job, pid=args.pid)
        if not jobs:
            print("megatron-ft: no ft_launcher of yours runs on this node", file=sys.stderr)
            return _NOTHING_DONE
        try:
            return act(jobs, args)
        except ConfigError:
            raise
        except (FaultToleranceError, ProcessLookupError) as error:  # of a rank that has exited
            print(f"megatron-ft: {error}", file=sys.stderr)
            return _NOTHING_DONE

    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="RUN_ID", help="the job's --rdzv-id")
    which.add_argument("--pid", type=int, metavar="LAUNCHER_PID", help="the process of this node's ft_launcher")
    parser.set_defaults(run=run)
    return parser


def _order(what: Pause | Resume, done: str, was_done: str, jobs: list[RunningJob], _: argparse.Namespace) -> int:
    code = 0
    for job in jobs:
        try:
            print(f"{done if order(job, what) else was_done}: {job.describe()}")
        except FaultToleranceError as error:
            print(f"megatron-ft: {error}", file=sys.stderr)
            code = _NOTHING_DONE
    return code


def _stacks(jobs: list[RunningJob], args: argparse.Namespace) -> int:
    ranks = [(row, job) for job in jobs for row in running_ranks(job) if args.rank in (None, row.rank)]
    if args.rank is not None and not ranks:
        raise ConfigError(f"--rank {args.rank}: not a rank that runs on this node")
    if not ranks:
        print("megatron-ft: no rank of yours runs on this node", file=sys.stderr)
    code = 0 if ranks else _NOTHING_DONE
    for row, job in sorted(ranks, key=lambda each: each[0].rank):
        try:
            print(show_rank(job, row.local_rank), flush=True)
        except FaultToleranceError as error:
            print(f"megatron-ft: rank {row.rank} can't be shown: {error}", file=sys.stderr, flush=True)
            code = _NOTHING_DONE
    return code


def _kill(jobs: list[RunningJob], args: argparse.Namespace) -> int:
    def pid_of_rank() -> int:
        pids = {row.rank: row.pid for job in jobs for row in running_ranks(job)}
        if args.rank not in pids:
            there = f"those of {jobs[0].run_id} here: {', '.join(map(str, sorted(pids))) or 'none'}"
            raise ConfigError(f"--rank {args.rank}: not a rank that runs on this node; {there}")
        return pids[args.rank]

    pid = pid_of_rank()
    process = os.pidfd_open(pid)
    try:
        # the id may have become another process's since the launcher named it; it can't any more
        if pid_of_rank() != pid:
            raise FaultToleranceError(f"rank {args.rank} has exited")
        signal.pidfd_send_signal(process, args.signal)
    finally:
        os.close(process)
    print(f"sent {args.signal.name} to rank {args.rank} (process {pid}): {jobs[0].describe()}")
    return 0
