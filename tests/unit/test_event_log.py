"""One process's event log stays within its bound, and readable; the newest records are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_ft.ipc.event_log import EventLog
from megatron_ft.report.read import read_directory


def numbers(directory: Path) -> list[int]:
    """Of the records that are left, as the report reads them."""
    return [record.get("number") for log in read_directory(directory) for record in log.records]


def test_a_log_within_its_bound_is_one_file(tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path), role="launcher", run_id="x", max_bytes=100_000)
    for number in range(100):
        log.write("tick", number=number)
    log.close()
    assert len(os.listdir(tmp_path)) == 1
    assert numbers(tmp_path) == list(range(100))


def test_the_oldest_records_go_first(tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path), role="monitor", run_id="x", name="local0", max_bytes=20_000)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(5000):
        log.write("tick", number=number, padding="x" * 50)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_200
    assert len(os.listdir("/proc/self/fd")) == descriptors
    log.close()
    assert len(os.listdir(tmp_path)) == 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    left = numbers(tmp_path)
    assert left == list(range(left[0], 5000))
    assert len(left) > 5000 * 0.005
    headers = {path.read_text().splitlines()[0] for path in tmp_path.iterdir()}
    assert len(headers) == 1
    assert json.loads(headers.pop())["ev"] == "log_opened"


def test_no_bound(tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path), role="launcher", run_id="x", max_bytes=0)
    for number in range(3000):
        log.write("tick", number=number, padding="x" * 100)
    log.close()
    assert numbers(tmp_path) == list(range(3000))


def test_a_directory_that_is_gone_costs_records_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    log = EventLog.open(str(directory), role="launcher", run_id="x", max_bytes=2000)
    next(directory.iterdir()).unlink()
    directory.rmdir()
    for number in range(200):
        log.write("tick", number=number)
    log.close()
    assert capsys.readouterr().err.count("lost records") == 1
    assert not directory.exists()
