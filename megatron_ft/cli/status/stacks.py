"""`megatron-ft stacks`: what the ranks of a job do now, on this node."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_ft.cli.status.pause import add_job_options, choose
from megatron_ft.core.errors import ConfigError, FaultToleranceError
from megatron_ft.ipc.jobs import find_jobs, running_ranks, show_rank

_NOTHING_SHOWN = 1
_TEXT = "print what the ranks of a job do now, on this node: stack, section, collectives in flight"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "stacks",
        help=_TEXT,
        description=f"{_TEXT[0].upper()}{_TEXT[1:]}. The ranks get no signal: a thread of each answers. "
        "The exit code is 1 if a rank can't be shown.",
    )
    parser.add_argument("--rank", type=int, metavar="RANK", help="only this (global) rank")
    add_job_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    jobs = choose(find_jobs(), run_id=args.job, pid=args.pid)
    found: list[tuple[int, str, bool]] = []
    for job in jobs:
        for row in running_ranks(job):
            if args.rank in (None, row.rank):
                try:
                    found.append((row.rank, show_rank(job, row.local_rank), True))
                except FaultToleranceError as error:
                    found.append((row.rank, f"megatron-ft: rank {row.rank} can't be shown: {error}", False))
    if args.rank is not None and jobs and not found:
        raise ConfigError(f"--rank {args.rank}: not a rank that runs on this node")
    for _, text, is_shown in sorted(found):
        print(text, file=sys.stdout if is_shown else sys.stderr, flush=True)
    if not found:
        print("megatron-ft: no rank of yours runs on this node", file=sys.stderr)
    return 0 if found and all(is_shown for _, _, is_shown in found) else _NOTHING_SHOWN
