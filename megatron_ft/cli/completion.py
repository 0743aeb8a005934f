"""`megatron-ft completion`: prints a script that completes both commands in a shell; needs the extra `completion`."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from megatron_ft.cli.base.terminal import check_extra
from megatron_ft.config.files.options import add_ft_options, add_torchrun_options

_SHELLS = ("bash", "zsh", "tcsh")


def add_command(commands: Any, whole: argparse.ArgumentParser) -> None:
    """Add the command. ``whole``: parser of megatron-ft."""
    parser = commands.add_parser(
        "completion",
        help="a script that completes both commands in a shell",
        description='Print a script that completes megatron-ft and ft_launcher: eval "$(megatron-ft completion bash)"',
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=functools.partial(_run, whole))


def _run(whole: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    check_extra("shtab", "completion", extra="completion")
    import shtab

    launcher = argparse.ArgumentParser(prog="ft_launcher")  # torch's own parser isn't needed
    add_torchrun_options(launcher)
    for action in launcher._actions:
        action.help = ""  # shtab leaves out what has no help
    add_ft_options(launcher)
    for parser in (whole, launcher):
        print(shtab.complete(parser, shell=args.shell))
    return 0
