"""`megatron-ft check-launch`: what each flag of a launch line of another launcher means for ft_launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from typing import Any

from megatron_ft.cli.launch_line import LaunchLine, Meaning, find_launch_lines
from megatron_ft.core.errors import ConfigError

__all__ = ["add_commands"]

_FIRST_BYTES = 4096
_MAX_BYTES = 2**20


def add_commands(commands: Any) -> None:
    """Add it, and `launch`, to the subparsers of `megatron-ft`."""
    parser = commands.add_parser(
        "check-launch",
        help="what the flags of a line for torchrun or nvidia-resiliency-ext mean for ft_launcher",
        description="Read the launch lines of a script (sbatch, NeMo-Run, Bridge), or a command, and say flag by flag: "
        "works, means something else, ignored, refused. Exit code 1: one is refused; 2: there is no such line.",
    )
    parser.add_argument("words", metavar="FILE|COMMAND", nargs=argparse.REMAINDER, help="a script, or the command")
    parser.set_defaults(run=_run)
    parser = commands.add_parser(
        "launch", help="the same as ft_launcher", description="Runs ft_launcher.", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=_launch)


def _run(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ConfigError("check-launch: give a file, or a command")
    found = find_launch_lines(_text(words))
    if not found:
        raise ConfigError("no launch line was found: no torchrun, ft_launcher or python -m torch.distributed.run")
    for number, line in enumerate(found):
        if number:
            print()
        _show(line)
    other = _other_launcher()
    if other is not None:
        print(f"\n{other} is nvidia-resiliency-ext's: use `megatron-ft launch`, or put our ft_launcher first on PATH")
    return 1 if any(flag.meaning is Meaning.REFUSED for line in found for flag in line.flags) else 0


def _launch(args: argparse.Namespace) -> int:
    """The launcher is a process of its own, with nothing of this one loaded."""
    os.execv(sys.executable, [sys.executable, "-m", "megatron_ft.launcher", *args.arguments])


def _text(words: list[str]) -> str:
    if len(words) > 1:
        return shlex.join(words)
    if not os.path.exists(words[0]):
        if " " in words[0]:
            return words[0]
        raise ConfigError(f"there is no file {words[0]}")
    try:
        with open(words[0], errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"can't read {words[0]}: {error.strerror}") from None


def _show(line: LaunchLine) -> None:
    print(f"{line.launcher}: {len(line.flags)} flags")
    shown = [" ".join(flag.words) for flag in line.flags]
    width = min(50, max(map(len, shown), default=0))
    for flag, words in zip(line.flags, shown, strict=True):
        note = f": {flag.note}" if flag.note else ""
        print(f"  {words.ljust(width)}  {flag.meaning.value}{note}")
    print(f"use:\n  {line.to_use}")


def _other_launcher() -> str | None:
    """The ft_launcher that a shell would find first, where it isn't ours."""
    path = shutil.which("ft_launcher")
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return path if b"nvidia_resiliency_ext" in file.read(_FIRST_BYTES) else None
    except OSError:
        return None
