"""The exception of a rank, as torch's error handler and ours write it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType

import pytest
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from megatron_ft.core.diagnosis.exceptions import CrashOutput, words_of_error_file
from megatron_ft.rank.crash_reporter.error_file import write_error_file


class Mute(Exception):
    """It can't even say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    try:
        raise error
    except BaseException:  # noqa: BLE001 - any
        kind, value, where = sys.exc_info()
        assert kind is not None
        assert value is not None
        return kind, value, where


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_error_file_has_the_same_fields_as_that_of_torch(path: Path) -> None:
    error = ValueError("the batch\nis empty")
    written = []
    for write in (lambda: write_error_file(*raised(error)), lambda: ErrorHandler().record_exception(error)):
        path.unlink(missing_ok=True)
        try:
            raise error
        except ValueError:
            write()
        written.append(json.loads(path.read_text())["message"])
    assert written[0]["message"] == written[1]["message"] == "ValueError: the batch\nis empty"
    assert written[0]["extraInfo"].keys() == written[1]["extraInfo"].keys()


def test_error_file_is_read_as_it_was_written(path: Path) -> None:
    write_error_file(*raised(KeyError("lost")))
    words = words_of_error_file(path.read_text())
    assert words.error == "KeyError: 'lost'"
    assert words.where.startswith("test_error_file.py:")
    assert words.where.endswith(" raised")
    assert words.exception.startswith("Traceback (most recent call last):")
    assert words.raised_at_s is not None
    assert words.raised_at_s > 1_700_000_000


def test_existing_error_file_is_not_overwritten(path: Path) -> None:
    path.write_text("torch's")
    write_error_file(*raised(KeyError("later")))
    assert path.read_text() == "torch's"


def test_exception_whose_text_cannot_be_read_is_named_by_type(path: Path) -> None:
    write_error_file(*raised(Mute()))
    assert words_of_error_file(path.read_text()).error == "Mute: (its text can't be read)"


def test_an_interrupt_is_no_exception_of_the_script(path: Path) -> None:
    write_error_file(*raised(KeyboardInterrupt()))
    assert not path.exists()


def test_error_file_that_cannot_be_written_is_skipped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path / "not" / "there"))
    write_error_file(*raised(KeyError("x")))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    write_error_file(*raised(KeyError("x")))
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 100_000),
        *('{"message": 3}', '{"message": {"message": "x"}}', '{"message": {"message": 1, "extraInfo": []}}'),
    ],
)
def test_malformed_error_file_has_no_words(text: str) -> None:
    assert words_of_error_file(text) == CrashOutput()


def test_error_file_in_an_older_form_is_read(path: Path) -> None:
    path.write_text(json.dumps({"message": "SIGSEGV received"}))
    assert words_of_error_file(path.read_text()).error == "SIGSEGV received"


class Group(Exception):
    """Has what an ExceptionGroup, which Python 3.10 lacks, has."""

    exceptions = (LookupError("in a task"), KeyError("b"))


def test_group_of_exceptions_tells_its_first_one(path: Path) -> None:
    write_error_file(*raised(Group("unhandled errors in a TaskGroup (2 sub-exceptions)")))
    words = words_of_error_file(path.read_text())
    assert words.error == "Group: unhandled errors in a TaskGroup (2 sub-exceptions): LookupError: in a task"
