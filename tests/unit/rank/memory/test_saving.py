"""Where a rank saves, and that nothing happens without a keeper."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_ft import memory_checkpoint
from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.facts.launcher import RestoreFailed
from megatron_ft.core.memory.snapshots import Saved, SnapshotKey
from megatron_ft.core.messages.keeper_messages import Fetch, KeeperHello, KeeperWelcome, NotKept
from megatron_ft.ipc.memory import digests
from megatron_ft.rank.memory import restoring, saving
from tests.support.keepers import RealKeeper, ScriptedKeeper
from tests.support.launching import wait_until

RANK = {"RANK": "3", "WORLD_SIZE": "4", "FT_CYCLE": "2"}


def test_without_a_launcher_nothing_is_saved_or_restored(capfd: pytest.CaptureFixture[str]) -> None:
    threads = len(os.listdir("/proc/self/task"))
    state = {"w": torch.ones(2)}
    memory_checkpoint.save(1, state)
    memory_checkpoint.save(2, state)
    memory_checkpoint.wait()
    assert memory_checkpoint.restore(state) is None
    assert len(os.listdir("/proc/self/task")) == threads


def test_snapshot_that_is_not_newer_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "FT_KEEPER_SOCKET": "/nowhere", "FT_MEMORY_RESTORE": "1:7"}.items():
        monkeypatch.setenv(name, value)
    assert memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=7) is None


class EndedError(Exception):
    """Raised instead of the end of the process."""


@pytest.fixture
def in_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a keeper's socket, in the environment of rank 0 that restores iteration 7 of cycle 0."""

    def end(code: int) -> None:
        raise EndedError(code)

    path = tmp_path / "k"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "FT_CYCLE": "0", "FT_KEEPER_SOCKET": str(path)}
    for name, value in {**variables, "FT_MEMORY_RESTORE": "0:7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(saving, "_saver", None)
    monkeypatch.setattr(os, "_exit", end)
    return path


def test_rank_that_cannot_tell_of_a_failed_restore_says_why_and_ends(
    in_rank_0: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EndedError, match="1"):
        memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=6)
    (line,) = capfd.readouterr().err.splitlines()
    why = f"no keeper answers at {in_rank_0}"
    assert f"rank 0 can't restore iteration 7 from memory: SnapshotError: {why}" in line
    assert f"the rank ends, as its launcher can't be told: {why}" in line


def test_process_that_has_saved_can_restore_and_save_again(in_rank_0: Path) -> None:
    keeper = RealKeeper(in_rank_0)
    target = {"w": torch.zeros(2)}
    memory_checkpoint.save(7, {"w": torch.ones(2)})
    memory_checkpoint.wait()
    assert memory_checkpoint.restore(target) == 7
    assert target["w"].tolist() == [1.0, 1.0]
    keeper.said()
    memory_checkpoint.save(8, target)
    memory_checkpoint.wait()
    wait_until(lambda: Saved(SnapshotKey(0, 8)) in keeper.said(), 20.0)
    keeper.close()


def test_failed_restore_of_a_process_that_has_saved_is_told(in_rank_0: Path) -> None:
    keeper = RealKeeper(in_rank_0)
    memory_checkpoint.save(7, {"w": torch.ones(2)})
    memory_checkpoint.wait()
    with pytest.raises(SnapshotError, match=r"state\['more'\] was not saved"):
        memory_checkpoint.restore({"w": torch.zeros(2), "more": torch.zeros(2)})
    (failed,) = [each for each in keeper.said() if isinstance(each, RestoreFailed)]
    assert "was not saved" in failed.text
    keeper.close()


def test_rank_without_xxhash_tells_that_it_cannot_restore(in_rank_0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = RealKeeper(in_rank_0)
    monkeypatch.setattr(digests, "installed", lambda: None)
    with pytest.raises(SnapshotError, match="xxhash"):
        memory_checkpoint.restore({"w": torch.zeros(2)})
    (failed,) = [each for each in keeper.said() if isinstance(each, RestoreFailed)]
    assert (failed.rank, failed.key) == (0, SnapshotKey(0, 7))
    keeper.close()


def test_rank_whose_keeper_is_stopped_ends(in_rank_0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ScriptedKeeper(in_rank_0, {KeeperHello: KeeperWelcome(), Fetch: NotKept("there is none")})
    monkeypatch.setattr(restoring, "_TOLD_S", 0.3)
    with pytest.raises(SnapshotError, match="there is none"):
        memory_checkpoint.restore({"w": torch.zeros(2)})
    del keeper.answers[Fetch]  # what is sent to a process that is stopped arrives nowhere
    monkeypatch.setattr(restoring, "_FETCH_S", 0.3)
    with pytest.raises(EndedError):
        memory_checkpoint.restore({"w": torch.zeros(2)})
    keeper.close()


@pytest.mark.parametrize(("iteration", "every"), [(-1, 1), (3, 0)])
def test_numbers_out_of_range_are_mistakes(iteration: int, every: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        memory_checkpoint.save(iteration, {}, every=every)
