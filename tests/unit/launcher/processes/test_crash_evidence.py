"""The last words of a rank, from its report, its standard error, and an error file that may not be readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.diagnosis.exceptions import EXCEPTION_MARK, exception_entry
from megatron_ft.launcher.processes import crash_evidence
from megatron_ft.launcher.processes.crash_evidence import read_last_words


@pytest.mark.parametrize("reported", [False, True])
def test_error_file_that_cannot_be_read_is_not_the_same_as_no_error(
    tmp_path: Path, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = exception_entry(EXCEPTION_MARK, 5, "ValueError: bad", "") if reported else ""
    assert not read_last_words(text, str(tmp_path / "missing.json")).unread
    assert read_last_words(text, str(tmp_path)).unread is not reported  # no file
    monkeypatch.setattr(crash_evidence, "bounded_call", lambda _job, default: default)  # it takes too long
    words = read_last_words(text, str(tmp_path / "slow.json"))
    assert (words.unread, words.error) == (not reported, "ValueError: bad" if reported else "")


ABORT = """loading
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /x/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data \
size doesn't match expected size.
Fatal Python error: Aborted
"""


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (
            ABORT,
            "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4. "
            "Received data size doesn't match expected size.",
        ),
        ("terminate called without an active exception\n", ""),
    ],
)
def test_uncaught_exception_of_a_library_is_read_from_standard_error(tmp_path: Path, stderr: str, told: str) -> None:
    path = tmp_path / "stderr.log"
    path.write_text(stderr)
    words = read_last_words("", str(tmp_path / "missing.json"), str(path))
    assert words.error == ""  # a child of the rank may have written it
    assert words.terminated_by == told
