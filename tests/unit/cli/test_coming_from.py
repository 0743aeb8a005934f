"""docs/coming-from.md: every line that it tells people to type means what the page says."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from megatron_ft.config.files.options import add_ft_options, read_ft_options
from tests.support.launching import ROOT
from tests.support.torchrun_parser import torchrun_parser

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
LAUNCHES = [line for line in LINES if line.startswith("ft_launcher ")]
CODE = [line for line in LINES if line.startswith("from ")]


def test_every_line_is_tested_here() -> None:
    assert {*LAUNCHES, *CODE} == set(LINES)
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert sections == [
        "torchrun",
        "nvidia-resiliency-ext",
        "Megatron-LM",
        "Megatron-Bridge",
        "NeMo-Run",
        "Lightning",
        "Other programs",
    ]


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
