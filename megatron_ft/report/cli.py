"""`megatron-ft`: what the event logs of a run tell, and what a person wants of a job that runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_ft.core.errors import ConfigError
from megatron_ft.ipc.ft_options import with_hint
from megatron_ft.report import check_config, pausing
from megatron_ft.report.cycles import summarize
from megatron_ft.report.read import read_directory
from megatron_ft.report.table import check_rich, print_run

__all__ = ["main"]

_MISTAKE = 2
_NOTHING_FOUND = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The exit code: 0; 1 if there was nothing to report; 2 for a user's mistake, after one line on stderr.
    """
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
    except ConfigError as error:
        print(f"megatron-ft: error: {error}", file=sys.stderr)
        return _MISTAKE
    return code


class _Parser(argparse.ArgumentParser):
    """Its complaints are one line, with the option that was probably meant."""

    used: argparse.ArgumentParser | None = None

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        # argparse leaves options that a subcommand doesn't know to the parser above it
        _Parser.used = self
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(with_hint(message, _Parser.used or self))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron-ft", description="Tools for runs of ft_launcher.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    report = commands.add_parser("report", help="what happened, cycle by cycle", description=_report.__doc__)
    report.add_argument("log_dir", metavar="LOG_DIR", help="the directory that ft_launcher names as 'logs:'")
    report.set_defaults(run=_report)
    check_config.add_command(commands)
    pausing.add_commands(commands)
    return parser


def _report(args: argparse.Namespace) -> int:
    """Print a table of the cycles of each run whose event logs are in a directory."""
    check_rich()
    try:
        files = read_directory(args.log_dir)
    except OSError as error:
        raise ConfigError(f"{args.log_dir} can't be read: {error.strerror}") from None
    if not files:
        print(f"megatron-ft: no event logs in {args.log_dir}", file=sys.stderr)
        return _NOTHING_FOUND
    for run in summarize(files):
        print_run(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
