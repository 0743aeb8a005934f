"""``--ft-dry-run``: what a command line means here, without starting, opening or writing anything."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from megatron_ft.config.config import OPTIONS
from megatron_ft.config.files.options import rows
from megatron_ft.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.config.reference import IGNORED, SERVED
from megatron_ft.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.launcher import arguments
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.given_flags import GivenFlag
from megatron_ft.link.base.wording import columns, printable

_SECRET_NAME = r"[\w-]*(?:secret|token|passw|credential|authorization|api[_-]?key|access[_-]?key)[\w-]*"
_SECRET = re.compile(rf"(?i)(--{_SECRET_NAME}\s+|\b{_SECRET_NAME}\s*[=:]\s*)(?:(?:bearer|basic)\s+)?[^\s,;]+")
_USER_OF_A_URL = re.compile(r"://[^/\s@]+@")
_ACTED_ON = re.compile(
    r"(PET|FT|FAULT_TOL|MEGATRON_FT|NVRX|TORCH_ELASTIC|TORCHELASTIC|MASTER)_\w+|GROUP_RANK|OMP_NUM_THREADS|"
    r"JOB_COMPLETION_INDEX|KUBERNETES_SERVICE_HOST|SLURM_(ARRAY_JOB_ID|JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NNODES|NODEID|"
    r"PROCID|RESTART_COUNT|STEP_ID|STEP_NODELIST|STEP_NUM_NODES|STEP_NUM_TASKS)"
)
"""Variables that the launcher or torch acts on."""
_NOT_PASSED_ON = "(not passed on)"


def is_asked(flags: Sequence[GivenFlag]) -> bool:
    """Return True if the flags or the environment ask for a dry run."""
    option = LAUNCHER_OPTIONS["dry_run"]
    by_variable = any(os.environ.get(name) not in (None, "", "0") for name in option.variables)
    return by_variable or any(flag.dest == option.dest for flag in flags)


def show_mistakes(flags: Sequence[GivenFlag], first: ConfigError) -> int:
    """Print the known flags and every mistake that can be told from them; the exit code."""
    _print_flags([flag for flag in flags if flag.dest])
    sys.stdout.flush()
    known = {each.dest: each for each in OPTIONS.values() if not each.is_flag}
    mistakes = []
    for flag in flags:
        if flag.dest in known and flag.value is not None:
            try:
                known[flag.dest].parse(flag.value)
            except ConfigError as error:
                mistakes.append(str(error))
    for text in dict.fromkeys([*mistakes, str(first)]):
        print(launcher_lines.user_mistake(hide_secrets(text)), file=sys.stderr)
    return MISTAKE_CODE


def show(line: CommandLine, flags: Sequence[GivenFlag]) -> int:
    """Print what the command line means; the exit code."""
    namespace = copy.copy(line.namespace)
    namespace.log_dir = os.devnull  # else torch makes the directory
    before = dict(os.environ)
    try:
        config, _ = arguments.torch_launch_config(dataclasses.replace(line, namespace=namespace), log_dir=None)
    except ConfigError as error:
        return show_mistakes(flags, error)
    _print_flags(flags)
    for warning in line.options.warnings:
        print(f"warning: {hide_secrets(warning)}")
    _print_table("job", _job(line, config.nproc_per_node))
    _print_table("configuration", rows(line.options))
    _print_table(
        "environment of the launcher", [each for each in sorted(before.items()) if _ACTED_ON.fullmatch(each[0])]
    )
    _print_table("environment of the ranks, where it differs", _changes(before, line.rank_environment()))
    print("\nnothing was started: remove --ft-dry-run to launch")
    return 0


def _print_flags(flags: Sequence[GivenFlag]) -> None:
    given = [flag for flag in flags if flag.dest != LAUNCHER_OPTIONS["dry_run"].dest]
    written = [flag.word if flag.value is None else f"{flag.word} {flag.value}" for flag in given]
    _print_table("flags", zip(written, map(meaning_of_flag, given), strict=True))


def meaning_of_flag(flag: GivenFlag) -> str:
    """Return whose option a flag is, and what differs here."""
    field = flag.dest.removeprefix("ft_")
    if flag.dest != field and field in IGNORED:
        return f"nvidia-resiliency-ext: ignored ({IGNORED[field]})"
    if flag.dest != field:
        return f"nvidia-resiliency-ext: {SERVED[field] or 'the same'}" if field in SERVED else "megatron_ft only"
    known = TORCHRUN_OPTIONS.get(flag.dest)
    return f"torchrun: {known.here}" if known is not None and known.here else "torchrun: the same"


def _job(line: CommandLine, ranks: int) -> list[tuple[str, str]]:
    namespace = line.namespace
    return [
        ("nodes", f"{line.min_nodes}" if line.min_nodes == line.max_nodes else f"{line.min_nodes} to {line.max_nodes}"),
        ("ranks on this node", str(ranks)),
        ("restarts", str(namespace.max_restarts)),
        ("rendezvous", str(namespace.rdzv_backend)),
        ("endpoint", str(namespace.rdzv_endpoint or f"{namespace.master_addr}:{namespace.master_port}")),
        ("job id", line.run_id),
        *([("from the scheduler", line.taken)] if line.taken else []),
        ("script", f"{namespace.training_script} ({len(namespace.training_script_args)} arguments)"),
    ]


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str]]:
    names = sorted(before.keys() | after.keys())
    return [
        *((name, after.get(name, _NOT_PASSED_ON)) for name in names if before.get(name) != after.get(name)),
        ("RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...", "set by torch for each rank"),
        ("FT_CYCLE", "number of the cycle, from 0"),
        ("FT_KEEPER_SOCKET, FT_MEMORY_RESTORE", "set for memory checkpoints"),
    ]


def _print_table(title: str, rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> None:
    shown = []
    for row in rows:
        is_secret = row[-1] != _NOT_PASSED_ON and re.fullmatch(f"(?i){_SECRET_NAME}", row[0])
        cells = (row[0], "(set, not shown)") if is_secret else row
        shown.append([printable(hide_secrets(cell)) for cell in cells])
    if shown:
        print(f"{title}:")
        print("\n".join(f"  {text}" for text in columns(shown)))


def hide_secrets(text: str) -> str:
    """Return the text with values hidden that follow a name like "token", and the user of a URL."""
    return _USER_OF_A_URL.sub("://***@", _SECRET.sub(r"\1***", text))
