"""The exception of a rank, as torch's error handler and ours write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from megatron_ft.diagnosis.exceptions import CrashOutput, innermost_error, words_of_error_file
from megatron_ft.rank.crash_reporter.error_file import write_error_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_error_file_has_the_same_fields_as_that_of_torch(path: Path) -> None:
    error = ValueError("the batch\nis empty")
    written = []
    for write in (write_error_file, ErrorHandler().record_exception):
        path.unlink(missing_ok=True)
        try:
            raise error
        except ValueError:
            write(error)
        written.append(json.loads(path.read_text())["message"])
    assert written[0]["message"] == written[1]["message"] == "ValueError: the batch\nis empty"
    assert written[0]["extraInfo"].keys() == written[1]["extraInfo"].keys()


def test_error_file_that_is_there_or_cannot_be_written_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("torch's")
    write_error_file(KeyError("later"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path / "not" / "there"))
    write_error_file(KeyError("x"))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    write_error_file(KeyError("x"))
    assert path.read_text() == "torch's"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 100_000),
        *('{"message": 3}', '{"message": {"message": "x"}}', '{"message": {"message": 1, "extraInfo": []}}'),
    ],
)
def test_malformed_error_file_has_no_words(text: str) -> None:
    assert words_of_error_file(text) == CrashOutput()


class Group(Exception):
    """Has what an ExceptionGroup, which Python 3.10 lacks, has."""

    exceptions = (LookupError("in a task"), KeyError("b"))


WORKERS = """OSError: Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "train.py", line 6, in __getitem__
    raise OSError(5, "Input/output error", "/data/shard-17.bin")
OSError: [Errno 5] Input/output error: '/data/shard-17.bin'
"""
CHAINED = """RuntimeError: task failed
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in g
my.lib.TaskError: two
lines: of text
"""


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (WORKERS, "OSError: [Errno 5] Input/output error: '/data/shard-17.bin'"),
        (CHAINED, "my.lib.TaskError: two\nlines: of text"),
        ("ValueError: a plain one", "ValueError: a plain one"),
        ("E: Traceback (most recent call last):\n  cut", "E: Traceback (most recent call last):\n  cut"),
    ],
)
def test_exception_that_hands_on_a_traceback_is_told_by_the_last_one_in_it(told: str, found: str, path: Path) -> None:
    assert innermost_error(told) == found
    kind, _, message = told.partition(": ")
    write_error_file(type(kind, (Exception,), {})(message))
    assert words_of_error_file(path.read_text()).error == found
    path.write_text(json.dumps({"message": {"message": told, "extraInfo": {"timestamp": "1"}}}))
    assert words_of_error_file(path.read_text()).error == found, "as torch's own handler writes it"


def test_group_of_exceptions_tells_its_first_one(path: Path) -> None:
    write_error_file(Group("unhandled errors in a TaskGroup (2 sub-exceptions)"))
    words = words_of_error_file(path.read_text())
    assert words.error == "Group: unhandled errors in a TaskGroup (2 sub-exceptions): LookupError: in a task"
