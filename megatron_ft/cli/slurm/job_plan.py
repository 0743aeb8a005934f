"""`megatron-ft slurm`: its options, and its environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.cli.slurm.batch import Batch
from megatron_ft.cli.slurm.commands import export_of
from megatron_ft.cli.slurm.policy import Plan
from megatron_ft.config.config import OPTIONS
from megatron_ft.errors import ConfigError
from megatron_ft.link.base.wording import counted

_DESCRIPTION = """\
The body of a batch script: it runs ft_launcher on each node by srun, forwards Slurm's signals, and when the step
has ended it reads result.json and starts it again in the same allocation, requeues the job, or ends it."""
_EPILOG = """\
Everything after -- is for ft_launcher, which finds nodes, endpoint and id itself. docs/slurm.md has a script."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "slurm", help="the body of a batch script of Slurm", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--spares", type=int, default=0, metavar="N", help="nodes on standby (default 0)")
    parser.add_argument(
        "--max-lives", type=int, default=20, metavar="N", help="starts of the job in all (default %(default)s)"
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        default=3,
        metavar="N",
        help="end the job when this many lives in a row have failed (default %(default)s)",
    )
    parser.add_argument(
        "--exclude-bad-nodes",
        action="store_true",
        help="leave nodes that result.json lists as bad out of the next step, if enough others are left",
    )
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="one more option for srun")
    parser.add_argument(
        "--launcher", default="", metavar="PROGRAM", help="ft_launcher's path on the nodes (default: this Python's own)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none; also on a login node")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job, for --dry-run on a login node")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of ft_launcher")
    parser.set_defaults(run=_run)


def check_separator(words: Sequence[str]) -> None:
    """Check that ``--`` precedes arguments of ft_launcher. ``words`` follow ``megatron-ft slurm``.

    Without it argparse would take some of the launcher's and of the script's options for its own.

    Raises:
        ConfigError: ``--`` is missing, or nothing follows it.
    """
    if not {"--", "-h", "--help"} & {*words} or [*words, "--"].index("--") == len(words) - 1:
        raise ConfigError(
            "-- or what follows it is missing: what is to be run comes after --, as in: "
            "megatron-ft slurm --spares 1 -- --nproc-per-node 8 train.py"
        )


def _run(args: argparse.Namespace) -> int:
    batch = Batch(plan(args, os.environ), os.environ)
    if args.dry_run:
        batch.print_commands()
        return 0
    return batch.run()


def plan(args: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Return the plan for these options and environment.

    Raises:
        ConfigError: this is no job of Slurm, or an option is invalid.
    """
    job, nodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
    if args.dry_run and not job:
        job, nodes = "JOBID", str(args.spares + 1 if args.nodes is None else args.nodes)
    elif args.nodes is not None:
        raise ConfigError(f"--nodes {args.nodes}: only with --dry-run and outside a job; else #SBATCH --nodes says it")
    if not job or not nodes.isdecimal():
        raise ConfigError(
            "SLURM_JOB_ID isn't set: `megatron-ft slurm` is to be run in a batch script (sbatch); "
            "to see its commands: --dry-run --nodes N"
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdecimal() and int(tasks) > 1:
        raise ConfigError(
            f"srun has started `megatron-ft slurm` {tasks} times: run it without srun, in the batch script"
        )
    count = int(nodes)
    least = {"--spares": (args.spares, 0), "--max-lives": (args.max_lives, 1), "--max-failures": (args.max_failures, 1)}
    for name, (value, at_least) in {**least, "--nodes": (count, 1)}.items():
        if value < at_least:
            raise ConfigError(f"{name} {value}: must be at least {at_least}")
    if args.spares >= count:
        raise ConfigError(f"--spares {args.spares}: the job has {counted(count, 'node')}, at least 1 must train")
    log_dir = _value(args.arguments, OPTIONS["log_dir"].spellings)
    given = _value(args.arguments, ["--nnodes"])
    ours = [] if given else [f"--nnodes={count - args.spares}"]
    if not log_dir:
        log_dir = os.path.join(environ.get("SLURM_SUBMIT_DIR") or os.getcwd(), f"ft-{job}")
        ours.insert(0, f"--ft-log-dir={log_dir}")
    needed = str(count - args.spares) if given is None else given.partition(":")[0]
    if not needed.isdecimal() or int(needed) < 1:
        raise ConfigError(f"--nnodes: {given!r} is neither a number nor MIN:MAX")
    program = [args.launcher] if args.launcher else [sys.executable, "-m", "megatron_ft.launcher"]
    export = environ.get("SRUN_EXPORT_ENV", "")
    return Plan(
        job=job,
        nodes=count,
        needed=int(needed),
        max_lives=args.max_lives,
        max_failures=args.max_failures,
        log_dir=log_dir,
        launcher=(*program, *ours, *args.arguments),
        # the option equivalent to SRUN_EXPORT_ENV: no other default may overrule it
        srun_options=(*([f"--export={export}"] if export and not export_of(args.srun) else []), *args.srun),
        excludes_bad_nodes=args.exclude_bad_nodes,
    )


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of the launcher's option of one of these names, if given before the script's own."""
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option in names:
            return value if equals else next(iter(arguments[index + 1 :]), "")
        if word.endswith(".py"):
            break
    return None
