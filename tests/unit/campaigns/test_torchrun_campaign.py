"""PyTorch's tests of torchrun, run with our launcher: how a copy is adapted, and what is read from a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import torchrun

SOURCE = """import os
import torch.distributed.run as launch

def test_nodes():
    launch.main(["--nnodes=1"])
    launch.parse_min_max_nnodes("1")
    Process(target=launch.main)
"""


def test_adapted_copy_calls_our_main_and_keeps_all_else() -> None:
    adapted = torchrun.adapted(SOURCE).splitlines()
    assert adapted[2] == "from megatron_ft.launcher.main import main as ft_main"
    assert adapted[5:] == [
        '    ft_main(["--nnodes=1"])',
        '    launch.parse_min_max_nnodes("1")',
        "    Process(target=ft_main)",
    ]


def test_file_that_calls_torchrun_in_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed\.run"):
        torchrun.adapted("from torch.distributed.run import main\n")


def test_report_names_what_failed_and_what_was_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="not&#10;raised"/></testcase>'
        '<testcase name="c"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert torchrun.problems_in(report) == {"a": "", "b": "failure: not raised", "c": "skipped: no GPU"}
