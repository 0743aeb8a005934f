"""`megatron-ft check-config`: shows the effective configuration, and the source of each value; starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_ft.cli.base.terminal import terminal
from megatron_ft.config.files.options import (
    add_ft_options,
    add_torchrun_options,
    read_ft_options,
    read_torchrun_options,
    rows,
)
from megatron_ft.errors import ConfigError

_COLUMNS = ("name", "value", "from")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "check-config",
        help="what ft_launcher would use with a YAML file and options, and from where",
        description="Check a YAML file, and options of ft_launcher beside it, as ft_launcher would. "
        "A mistake is one line and exit code 2.",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="as for --ft-cfg-path")
    add_torchrun_options(parser)
    add_ft_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.file is not None:
        if args.ft_cfg_path is not None and args.ft_cfg_path != args.file:
            raise ConfigError(f"two files: {args.file} and {args.ft_cfg_path}")
        args.ft_cfg_path = args.file
    options = read_ft_options(args)
    read_torchrun_options(args, options)
    _print(rows(options))
    for warning in options.warnings:
        print(f"warning: {warning}")
    return 0


def _print(table: Sequence[tuple[str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for column in _COLUMNS:
        drawn.add_column(column)
    for row in table:
        drawn.add_row(*(Text(cell, style="dim" if row[2] == "default" else "") for cell in row))
    terminal().print(drawn)
