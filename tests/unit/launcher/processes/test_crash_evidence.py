"""The last words of a rank, from its report and from an error file that may not be readable."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_ft.core.diagnosis.exceptions import EXCEPTION_MARK, exception_entry
from megatron_ft.launcher.processes.crash_evidence import read_last_words


@pytest.mark.parametrize("reported", [False, True])
def test_error_file_that_cannot_be_read_is_not_the_same_as_no_error(tmp_path: Path, reported: bool) -> None:
    text = exception_entry(EXCEPTION_MARK, 5, "ValueError: bad", "") if reported else ""
    assert not read_last_words(text, str(tmp_path / "missing.json")).unread
    assert read_last_words(text, str(tmp_path)).unread is not reported  # no file
    stuck = tmp_path / "stuck.json"
    os.mkfifo(stuck)
    began_s = time.monotonic()
    words = read_last_words(text, str(stuck))
    assert time.monotonic() - began_s < 2.0
    assert (words.unread, words.error) == (not reported, "ValueError: bad" if reported else "")
    os.close(os.open(stuck, os.O_WRONLY))  # lets the reader go on
    for _ in range(100):
        words = read_last_words(text, str(tmp_path / "missing.json"))
        if not words.unread:
            break
        time.sleep(0.02)
    assert not words.unread
