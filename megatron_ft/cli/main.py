"""`megatron-ft`: reports from the event logs of runs, and commands for running jobs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import megatron_ft
from megatron_ft.cli import config_template, node_commands, node_health, report
from megatron_ft.cli.slurm import job_plan as slurm
from megatron_ft.cli.status import status
from megatron_ft.config.files.options import with_hint
from megatron_ft.config.removed import REMOVED_COMMANDS
from megatron_ft.errors import ConfigError, nearest
from megatron_ft.exit_codes import MISTAKE_CODE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The exit code: 0; 1 if there was nothing to report; 2 for a user error, after one line on stderr. Without a
        subcommand the help is printed.
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        if words and words[0] in REMOVED_COMMANDS:
            raise ConfigError(f"there is no command {words[0]} any more: {REMOVED_COMMANDS[words[0]]}")
        if words[:1] == ["launch"]:  # in place of this process, so that nothing loaded here is in it
            os.execv(sys.executable, [sys.executable, "-m", "megatron_ft.launcher", *words[1:]])
        if words[:1] == ["slurm"]:
            slurm.check_separator(words[1:])
        parser, commands = _parser()
        if not words:
            parser.print_help()
            return 0
        if words[0][:1] != "-" and words[0] not in commands:
            raise ConfigError(f"there is no command {words[0]}{nearest(words[0], commands)}")
        args = parser.parse_args(words)
        code: int = args.run(args)
    except ConfigError as error:
        print(f"megatron-ft: error: {error}", file=sys.stderr)
        return MISTAKE_CODE
    return code


class _Parser(argparse.ArgumentParser):
    """Parser whose complaints are one line, with the option that was probably meant."""

    used: argparse.ArgumentParser | None = None

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        # argparse leaves options that a subcommand doesn't know to the parser above it
        _Parser.used = self
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(with_hint(message, _Parser.used or self))


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and the names of the commands."""
    parser = _Parser(prog="megatron-ft", description="Tools for runs of ft_launcher.")
    parser.add_argument("--version", action="version", version=f"megatron-ft {megatron_ft.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    report.add_command(commands)
    config_template.add_command(commands)
    status.add_command(commands)
    node_commands.add_commands(commands)
    slurm.add_command(commands)
    node_health.add_command(commands)
    commands.add_parser("launch", help="the same as ft_launcher")
    return parser, list(commands.choices)


if __name__ == "__main__":
    sys.exit(main())
