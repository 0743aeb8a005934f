"""Files that a script has looked at before its ranks are forked."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from megatron_ft.rank.run_ahead import read_files
from megatron_ft.rank.run_ahead.read_files import ReadFiles


@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_a_file_that_appears_changes_or_goes_is_told(place: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        path = Path(directory, "checkpoint")
        for change in (lambda: path.write_text("1"), lambda: path.write_text("23"), path.unlink):
            looked = ReadFiles()
            looked.note(str(path))
            assert looked.changed() is None
            change()
            assert looked.changed() == str(path)


def test_kernel_files_and_devices_are_not_noted() -> None:
    looked = ReadFiles()
    for path in ("/proc/self/stat", "/sys/kernel", "/dev/null"):
        looked.note(path)
    assert len(looked) == 0


def test_a_link_to_nowhere_is_told_when_it_leads_elsewhere(tmp_path: Path) -> None:
    link, looked = tmp_path / "latest", ReadFiles()
    link.symlink_to("iteration_100")
    looked.note(str(link))
    assert looked.changed() is None
    link.unlink()
    link.symlink_to("iteration_200")
    assert looked.changed() == str(link)


def test_file_open_or_mapped_at_the_fork_counts_as_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what this process writes its output to may grow meanwhile
    monkeypatch.setattr(read_files, "is_own", lambda file: file.startswith(str(tmp_path)))
    for is_mapped, name in itertools.product((True, False), ("weights", os.fsdecode(b"not utf-8: \xe9"))):
        path, looked = tmp_path / f"{name}-{is_mapped}", ReadFiles()
        path.write_text("weights")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            if is_mapped:
                file.close()
            looked.note_unseen()
        assert looked.changed() is None
        path.write_text("others")
        assert looked.changed() == str(path)
