"""One process's event log stays within its bound, and readable; the newest records are kept."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.logs.read import EventLogFile, read_directory
from megatron_ft.link.facts.shared import RecordsLost, Warning_
from megatron_ft.records import event_log
from megatron_ft.records.event_log import EventLog


def numbers(directory: Path) -> list[int]:
    """Of the records that are left, as the report reads them."""
    return [int(text.split()[0]) for log in read_directory(directory) for text in texts(log)]


def texts(log: EventLogFile) -> list[str]:
    """Of its warnings."""
    return [entry.record.text for entry in log.entries if isinstance(entry.record, Warning_)]


def tick(number: int, padding: int = 0) -> Warning_:
    return Warning_(text=f"{number} {'x' * padding}")


def open_below(directory: Path) -> list[str]:
    """Files there that this process has open; those of other tests in it may come and go."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def test_the_oldest_records_go_first(tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path), role="monitor", run_id="x", name="local0", max_bytes=20_000)
    for number in range(5000):
        log.write(tick(number, 50))
        with contextlib.suppress(FileNotFoundError):  # it is just being renamed
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_200
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_200
    assert open_below(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    left = numbers(tmp_path)
    assert left == list(range(left[0], 5000))
    assert len(left) > 5000 * 0.005
    headers = {path.read_text().splitlines()[0] for path in tmp_path.iterdir()}
    assert len(headers) == 1
    assert json.loads(headers.pop())["ev"] == "log_opened"


def test_a_directory_that_is_gone_costs_records_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    log = EventLog.open(str(directory), role="launcher", run_id="x", max_bytes=2000)
    assert log.flush(30)
    next(directory.iterdir()).unlink()
    directory.rmdir()
    for number in range(200):
        log.write(tick(number))
    log.close()
    assert capsys.readouterr().err.count("lost records") == 1
    assert not directory.exists()


def test_record_written_by_a_pending_file_job_is_kept_at_the_end(tmp_path: Path) -> None:
    log, go = EventLog.open(str(tmp_path), role="launcher", run_id="x"), threading.Event()
    log.do(lambda: go.wait(30) and log.write(tick(1)))
    threading.Timer(0.1, go.set).start()
    log.close(30)
    assert numbers(tmp_path) == [1]


def silent_directory(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no event log can be opened."""
    answers, real_open = threading.Event(), os.open

    def slow_open(path: str, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(event_log.SUFFIX):
            assert answers.wait(60)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", slow_open)
    return answers


def test_a_directory_that_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no room any more is counted, and told where it is missing; what had, is written when it answers."""
    answers = silent_directory(monkeypatch)
    log = EventLog.open(str(tmp_path), role="monitor", run_id="x")
    for number in range(100):
        log.write(tick(number, 200_000))
    assert os.listdir(tmp_path) == []
    assert not log.flush(0.01)
    assert capsys.readouterr().err.count("loses records: too many wait") == 1
    answers.set()
    assert log.flush(30)
    log.write(tick(100))
    log.close()
    (read,) = read_directory(tmp_path)
    ticks = [int(text.split()[0]) for text in texts(read)]
    (lost,) = [entry.record.count for entry in read.entries if isinstance(entry.record, RecordsLost)]
    assert ticks == [*range(len(ticks) - 1), 100]
    assert 10 < len(ticks) == 101 - lost


def test_close_waits_for_the_directory_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = silent_directory(monkeypatch)
    log = EventLog.open(str(tmp_path), role="monitor", run_id="x")
    assert not log.flush(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(log._files, "stands_for_s", lambda: 10.0**7)
        log.close(10**6)  # at once, else this test never ends
    assert "lost its last records" in capsys.readouterr().err
    answers.set()
    assert log._files.finish(30)
