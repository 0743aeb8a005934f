"""`megatron-ft config-template`: prints a commented configuration file to start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import megatron_ft

TEMPLATES = Path(megatron_ft.__file__).with_name("configs")


def names() -> list[str]:
    """Return the names of the templates."""
    return sorted(str(path.relative_to(TEMPLATES).with_suffix("")) for path in TEMPLATES.rglob("*.yaml"))


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "config-template",
        help="a commented YAML file to start from",
        description="Print a commented YAML file: `megatron-ft config-template megatron > ft.yaml`. Templates with "
        "faults/ are fault plans, for a rehearsal.",
    )
    parser.add_argument("name", choices=names(), metavar="NAME", help=", ".join(names()))
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    print((TEMPLATES / f"{args.name}.yaml").read_text(), end="")
    return 0
