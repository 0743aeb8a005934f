"""The process that forks launchers for tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import forked_launcher
from tests.support.launching import clean_environment, marked


def test_a_server_that_answers_too_late_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its answer would be taken for the process id of the next launcher."""
    monkeypatch.setattr(forked_launcher, "START_S", 0.01)
    monkeypatch.setattr(forked_launcher, "servers", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    base = clean_environment()
    name = f"FT_TEST_LATE_{os.getpid()}"
    words = [sys.executable, "-m", forked_launcher.MODULE]
    with pytest.raises(TimeoutError):
        forked_launcher.start(words, [], env=base, base=base, mark=f"{name}=1", cwd=tmp_path, output=(1, 2))
    assert forked_launcher.servers == {}
    assert os.listdir(tmp_path) == []
    assert marked(name) == []
