"""Megatron-Bridge's own unit tests of the module pass with ours, where FT_BRIDGE_SOURCE names a checkout of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT


def test_bridge_unit_tests_pass_with_our_module(tmp_path: Path) -> None:
    checkout = os.environ.get("FT_BRIDGE_SOURCE")
    if checkout is None:
        pytest.skip("FT_BRIDGE_SOURCE names no checkout of Megatron-Bridge")
    text = (Path(checkout) / "tests/unit_tests/training/test_fault_tolerance.py").read_text()
    (tmp_path / "test_bridge_ft.py").write_text(text)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)),
        # of how its module writes the state file: by json.dump
        *("-k", "not preserves_previous_state", "-p", "tests.support.bridge_as_ours", str(tmp_path)),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
