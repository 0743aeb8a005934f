"""Files that a script has looked at before its ranks are forked."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megatron_ft.rank.looked_at import LookedAt


@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_a_file_that_appears_changes_or_goes_is_told(place: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        path = Path(directory, "checkpoint")
        for change in (lambda: path.write_text("1"), lambda: path.write_text("23"), path.unlink):
            looked = LookedAt()
            looked.note(str(path))
            assert looked.changed() is None
            change()
            assert looked.changed() == str(path)


def test_what_the_kernel_makes_up_is_no_file() -> None:
    looked = LookedAt()
    for path in ("/proc/self/stat", "/sys/kernel", "/dev/null"):
        looked.note(path)
    assert len(looked) == 0
