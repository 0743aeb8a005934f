"""`megatron-ft`: what the event logs of a run tell, offline."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_ft.core.errors import ConfigError
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
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"megatron-ft: error: {error}", file=sys.stderr)
        return _MISTAKE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-ft", description="Tools for runs of ft_launcher.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="what happened, cycle by cycle", description=_report.__doc__)
    report.add_argument("log_dir", metavar="LOG_DIR", help="the directory that ft_launcher names as 'logs:'")
    report.set_defaults(run=_report)
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
