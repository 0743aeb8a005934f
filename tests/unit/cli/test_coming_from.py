"""docs/coming-from.md: every line that it tells people to type means what the page says."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex

import pytest

from megatron_ft.cli import main as cli
from megatron_ft.cli.check_launch import Meaning, find_launch_lines
from megatron_ft.ipc.config.options import add_ft_options, read_ft_options
from megatron_ft.ipc.config.torchrun import add_torchrun_options
from tests.support.launching import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
LAUNCHES = [line for line in LINES if line.startswith("ft_launcher ")]
CHECKS = [line for line in LINES if line.startswith("megatron-ft check-launch ")]
CODE = [line for line in LINES if line.startswith("from ")]


def test_every_line_is_tested_here() -> None:
    assert {*LAUNCHES, *CHECKS, *CODE} == set(LINES)
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert sections == ["torchrun", "nvidia-resiliency-ext", "Megatron-LM", "Megatron-Bridge", "NeMo-Run", "Lightning"]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_is_one_of_ours(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = find_launch_lines(line)
    assert {flag.meaning for flag in found.flags} <= {Meaning.WORKS, Meaning.DIFFERS}
    parser = argparse.ArgumentParser()
    add_torchrun_options(parser)
    add_ft_options(parser)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    namespace = parser.parse_args(shlex.split(line)[1:])
    assert namespace.script == found.script[0]
    namespace.ft_cfg_path = None  # the page's file isn't there
    assert read_ft_options(namespace).warnings == []


@pytest.mark.parametrize("line", CHECKS)
def test_a_check_finds_nothing_that_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)[1:]) == 0
    assert "use:\n  ft_launcher " in capsys.readouterr().out


@pytest.mark.parametrize("line", CODE)
def test_an_import_finds_what_it_names(line: str) -> None:
    (statement,) = ast.parse(line).body
    assert isinstance(statement, ast.ImportFrom)
    assert statement.module is not None
    spec = importlib.util.find_spec(statement.module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        text = file.read()
    for alias in statement.names:
        found = alias.name == "*" or f'"{alias.name}"' in text or f"class {alias.name}" in text
        assert found or importlib.util.find_spec(f"{statement.module}.{alias.name}") is not None
