"""docs/coming-from.md: every line of ft_launcher that it tells people to type is accepted."""

from __future__ import annotations

import argparse
import shlex

import pytest

from megatron_ft.config.files.options import add_ft_options, read_ft_options
from tests.support.launching import ROOT
from tests.support.torchrun_parser import torchrun_parser

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
LAUNCHES = [line for line in LINES if line.startswith("ft_launcher ")]


@pytest.mark.parametrize("line", LAUNCHES)
def test_launch_line_is_accepted_without_a_warning(line: str) -> None:
    parser = torchrun_parser()
    add_ft_options(parser)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    namespace = parser.parse_args(shlex.split(line)[1:])
    assert namespace.script.endswith(".py")
    namespace.ft_cfg_path = None  # the page's file isn't there
    warnings = read_ft_options(namespace).warnings
    assert warnings == [] or namespace.ft_dry_run
