"""What ``ft_launcher --help`` lists."""

from __future__ import annotations

import argparse
import re

import pytest

from megatron_ft.config.config import OPTIONS
from megatron_ft.config.files.options import add_ft_options
from megatron_ft.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.launcher.help import group_help


def launcher_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ft_launcher")
    for name in TORCHRUN_OPTIONS:
        parser.add_argument(f"--{name}", help="an option of torchrun")
    parser.add_argument("--newer-option-of-torchrun", help="one that isn't in our table")
    add_ft_options(parser)
    parser.add_argument("--version", action="version", version="1")
    parser.add_argument("training_script", help="the script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    group_help(parser)
    return parser


def test_help_shows_the_ten_first_options_and_help_all_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            launcher_parser().parse_args([flag])
        assert end.value.code == 0
        listed[flag] = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    ours = {each.spellings[0] for each in OPTIONS.values()}
    assert len(listed["--help"]) == 10 + 2  # --help-all, --version; -h begins its line
    every = listed["--help-all"]
    assert {*ours, *(f"--{name}" for name in TORCHRUN_OPTIONS), "--newer-option-of-torchrun"} <= set(every)
    assert len(every) == len(set(every))
