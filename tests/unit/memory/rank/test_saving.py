"""A snapshot is what `save` was given, at the moment of the call, or there is none; training is held up for neither."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft import memory_checkpoint
from megatron_ft.errors import SnapshotError
from megatron_ft.link.facts.launcher import RestoreFailed
from megatron_ft.memory.base import digests
from megatron_ft.memory.base.keeper_messages import (
    Granted,
    KeeperHello,
    NotKept,
    RankBegan,
)
from megatron_ft.memory.rank import copying, restoring, saving
from megatron_ft.memory.rank.saving import Saver, is_aligned
from megatron_ft.memory.rules.retention import BeginSegment
from megatron_ft.memory.rules.snapshots import Saved, SnapshotKey
from tests.support.keepers import RealKeeper, ScriptedKeeper, be_rank_0
from tests.support.launching import wait_until

BOUND_S = 20.0
OPEN = {KeeperHello: Granted()}


class EndedError(Exception):
    """Raised instead of the end of the process."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path of a keeper's socket, in the environment of rank 0 in cycle 0."""

    def end(code: int) -> None:
        raise EndedError(code)

    path = tmp_path / "k"
    be_rank_0(path, monkeypatch)
    monkeypatch.setattr(restoring, "has_restored", False)
    monkeypatch.setattr(os, "_exit", end)
    yield path
    if saving.running is not None:
        saving.running.wait(BOUND_S)


@pytest.fixture
def keeper(path: Path) -> Iterator[RealKeeper]:
    keeper = RealKeeper(path, answers=True)
    yield keeper
    keeper.close()


@pytest.fixture
def scripted(path: Path) -> Iterator[ScriptedKeeper]:
    keeper = ScriptedKeeper(path, dict(OPEN))
    yield keeper
    keeper.close()


def saver() -> Saver:
    found = saving.running
    assert found is not None
    return found


def save(iteration: int, state: object | None = None) -> bool:
    """Save, wait, and return whether that iteration is verified."""
    memory_checkpoint.save(iteration, {"w": torch.ones(1000)} if state is None else state)
    memory_checkpoint.wait()
    verified = saver().verified
    return verified is not None and verified.iteration == iteration


def restored(iteration: int, state: dict[Any, Any], era: int = 0, cycle: int = 0) -> dict[Any, Any]:
    """Fill a state with what was saved."""
    os.environ["FT_MEMORY_RESTORE"] = f"{cycle}:{era}:{iteration}"
    try:
        assert memory_checkpoint.restore(state) == iteration
    finally:
        os.environ["FT_MEMORY_RESTORE"] = ""
    return state


# -- what is saved ------------------------------------------------------------------------------------------------


def _each(act: Callable[[Any, Any], object]) -> Callable[[list[Any], list[Any]], object]:
    return lambda weights, averages: [*map(act, weights, averages)]


SWAPS: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "by data": _each(lambda weight, average: weight.data.copy_(average)),
    "by foreach": lambda weights, averages: torch._foreach_copy_([each.data for each in weights], averages),
    "swap_tensors": _each(
        lambda weight, average: torch.utils.swap_tensors(weight, torch.nn.Parameter(average.clone()))
    ),
    "load_state_dict": lambda weights, averages: torch.nn.ParameterList(weights).load_state_dict(
        {str(at): each for at, each in enumerate(averages)}
    ),
    "assigned": _each(lambda weight, average: setattr(weight, "data", average.clone())),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_weights_swapped_for_an_evaluation_right_after_save_are_not_in_the_snapshot(
    keeper: RealKeeper, swap: str
) -> None:
    weights = [torch.nn.Parameter(torch.full((64 << 10,), 1.0)) for _ in range(24)]
    averages = [torch.full((64 << 10,), 2.0) for _ in weights]
    save(1, {"p": list(weights)})
    memory_checkpoint.save(2, {"p": list(weights)})
    SWAPS[swap](weights, averages)
    memory_checkpoint.wait()
    found = restored(2, {})["p"]
    assert {float(value) for each in found for value in each.unique()} == {1.0}


def test_tensors_of_all_sizes_that_a_system_call_takes_together_are_saved(keeper: RealKeeper) -> None:
    """More small ones than one system call takes, with large and strange ones in between."""
    draw = torch.Generator().manual_seed(1)
    large = torch.randn(3 << 20, generator=draw)
    tensors = [torch.randn(number % 7, generator=draw) for number in range(2500)]
    tensors[1100:1100] = [large, large[1::3], large[: 1 << 20].reshape(1024, 1024).t(), torch.randn(5, 1).expand(5, 9)]
    save(1, {"t": tensors})
    found = restored(1, {})["t"]
    assert all(torch.equal(each, wanted) for each, wanted in zip(found, tensors, strict=True))
    assert len(found) == len(tensors)


def _save_in_a_thread(*given: Any) -> None:
    thread = threading.Thread(target=memory_checkpoint.save, args=given)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_thread", [False, True])
def test_save_of_a_signal_handler_or_another_thread_while_one_runs_is_skipped_with_a_line(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_thread: bool
) -> None:
    first, second = ({"p": [torch.full((1 << 16,), value) for _ in range(16)]} for value in (1.0, 2.0))
    move = copying.move

    def interrupted(moves: Any) -> None:
        monkeypatch.setattr(copying, "move", move)  # once
        if is_thread:
            _save_in_a_thread(3, second)
        else:
            signal.raise_signal(signal.SIGUSR1)
        move(moves)

    save(1, first)
    monkeypatch.setattr(copying, "move", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: memory_checkpoint.save(3, second))
    try:
        assert save(2, first)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert {float(value) for each in restored(2, {})["p"] for value in each.unique()} == {1.0}
    assert "a memory checkpoint is skipped: save was called while another save runs" in capfd.readouterr().err


@pytest.mark.parametrize("every", [1, 5])
def test_lower_iteration_begins_an_era_whose_snapshots_are_newer(keeper: RealKeeper, every: int) -> None:
    for line, iterations in (("A", (5, 10, 15, 20)), ("B", range(6, 11))):
        for iteration in iterations:
            memory_checkpoint.save(iteration, {"line": line, "w": torch.ones(2)}, every=every)
            memory_checkpoint.wait()
    assert saver().verified == SnapshotKey(0, 1, 10)
    wait_until(lambda: Saved(SnapshotKey(0, 1, 10)) in keeper.heard, BOUND_S)
    told = [each.key for each in keeper.heard if isinstance(each, Saved)]
    assert sorted(told) == told
    assert [each.iteration for each in told if each.era] == [each for each in range(6, 11) if each % every == 0]
    assert restored(10, {}, era=1)["line"] == "B"


def test_iteration_saved_twice_is_refused_with_a_line(keeper: RealKeeper, capfd: pytest.CaptureFixture[str]) -> None:
    save(4, {"w": torch.ones(2)})
    save(4, {"w": torch.zeros(2)})
    assert restored(4, {})["w"].tolist() == [1.0, 1.0]
    assert "memory checkpoint of iteration 4 is skipped: it was saved before" in capfd.readouterr().err


@pytest.mark.parametrize("growth", [[300_000], [100, 200_000, 900_000], [1 << 20, 10, 1 << 21]])
def test_values_that_grow_get_a_larger_segment(keeper: RealKeeper, growth: list[int]) -> None:
    history: list[float] = []
    for iteration, more in enumerate([0, *growth], 1):
        history += [0.125] * more
        assert save(2 * iteration, {"w": torch.ones(1000), "history": history})
        assert save(2 * iteration + 1, {"w": torch.ones(1000), "history": history})
    assert restored(2 * iteration + 1, {})["history"] == history


# -- what can't be kept -------------------------------------------------------------------------------------------


def test_value_that_cannot_be_kept_is_an_error_at_first_and_a_warning_later(
    keeper: RealKeeper, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SnapshotError, match=r"state\['best'\]\[1\] is of type object"):
        memory_checkpoint.save(1, {"w": torch.ones(2), "best": [1, object()]})
    assert save(2, {"w": torch.ones(2), "best": 0})
    assert not save(3, {"w": torch.ones(2), "best": object()})
    assert not save(4, {"w": torch.ones(2), "best": object()})
    assert save(5, {"w": torch.ones(2), "best": 0})
    lines = capfd.readouterr().err
    assert re.findall(r"memory checkpoint of iteration (\d) is given up", lines) == ["3"]


def test_ten_failures_in_a_row_are_said_with_the_reason(
    keeper: RealKeeper, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(1)
    for iteration in range(2, 20):
        save(iteration, {"w": object()})
    assert capfd.readouterr().err.count("none of the last 10 memory checkpoints was kept: state['w'] is of type") == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("copy_tensors", RuntimeError("CUDA out of memory. 7 MiB")),
        ("copy_tensors", MemoryError()),
        ("refuse_chunk", OSError("0 GB are free")),
    ],
)
def test_copy_without_memory_costs_one_snapshot_and_not_the_training(
    keeper: RealKeeper, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(saving, name, fail)
        assert not save(1)
        assert not save(2)
    assert capfd.readouterr().err.count(f"is given up, training goes on: {error or 'MemoryError'}") == 1
    assert save(3)


def test_thread_that_cannot_start_costs_one_snapshot_and_not_the_training(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a state that has grown copied into the segment of before. A smaller one is, and nobody verifies it."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for iteration, size, copies in ((1, 8, 0), (3, 1 << 22, 0), (5, 8, 1)):
        copied: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            patched.setattr(saving, "copy_tensors", lambda *of, copied=copied: copied.append(of))
            assert not save(iteration, {"w": torch.zeros(size)})
        assert len(copied) == copies
        assert save(iteration + 1)


# -- keepers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quick", "slow"), [(1, 2), (2, 3), (2, 5), (3, 4), (1, 9)])
def test_ranks_of_any_speed_have_snapshots_in_common(quick: int, slow: int) -> None:
    """Each is busy for another number of intervals after a snapshot."""

    def taken(busy: int, first: int) -> set[int]:
        found, free_at, skipped = set[int](), 0, 0
        for number in range(first, 300):
            if number >= free_at and is_aligned(number, skipped):
                found.add(number)
                free_at, skipped = number + busy, 0
            else:
                skipped += 1
        return found

    common = sorted(taken(quick, 0) & taken(slow, 1))
    assert max(later - earlier for earlier, later in pairwise(common)) <= 4 * slow


def test_keeper_that_does_not_answer_is_waited_for_once(
    scripted: ScriptedKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_WAIT_S", 0.5)
    began_s = time.monotonic()
    for iteration in range(1, 20):
        memory_checkpoint.save(iteration, {"w": torch.ones(2)})
    assert 0.4 < time.monotonic() - began_s < 5.0
    assert scripted.count(BeginSegment) == 1


def test_keeper_that_refuses_is_asked_again_also_one_that_replaces_it(scripted: ScriptedKeeper) -> None:
    scripted.answers[BeginSegment] = NotKept("no memory")
    assert not save(1)
    saver()._connection.close()
    assert not save(2)
    assert not save(3)
    assert (scripted.count(KeeperHello), scripted.count(BeginSegment)) == (2, 3)


# -- other processes ----------------------------------------------------------------------------------------------


def test_without_a_launcher_nothing_is_saved_or_restored(capfd: pytest.CaptureFixture[str]) -> None:
    threads = set(threading.enumerate())
    state = {"w": torch.ones(2)}
    memory_checkpoint.save(1, state)
    memory_checkpoint.save(2, state)
    memory_checkpoint.wait()
    assert memory_checkpoint.restore(state) is None
    assert set(threading.enumerate()) <= threads


def test_mapped_segment_is_not_passed_on_to_a_fork_which_would_keep_it_from_being_sealed(keeper: RealKeeper) -> None:
    assert save(1)
    wait_until(lambda: saver()._mapping is not None, BOUND_S)
    maps = Path("/proc/self/smaps").read_text()
    flags = re.findall(r"ft_snapshot.*?VmFlags: ([a-z ]+)", maps, re.DOTALL)
    assert flags
    assert all("dc" in each.split() for each in flags)


# -- restoring ----------------------------------------------------------------------------------------------------


def test_snapshot_that_is_not_newer_is_not_restored_and_the_launcher_is_told(keeper: RealKeeper) -> None:
    os.environ["FT_MEMORY_RESTORE"] = "0:0:7"
    assert memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=7) is None
    wait_until(lambda: RankBegan(SnapshotKey(0, 0, 7), None, 7) in keeper.heard, BOUND_S)


def test_process_that_has_saved_can_restore_and_save_again(keeper: RealKeeper) -> None:
    save(7, {"w": torch.ones(2)})
    target = restored(7, {"w": torch.zeros(2)})
    assert target["w"].tolist() == [1.0, 1.0]
    assert save(8, target)
    assert save(9, target)
    began = [each for each in keeper.heard if isinstance(each, RankBegan)]
    assert [each.seconds is not None for each in began] == [True]


def test_rank_that_cannot_tell_of_a_failed_restore_says_why_and_ends(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_MEMORY_RESTORE", "0:0:7")
    with pytest.raises(EndedError, match="1"):
        memory_checkpoint.restore({"w": torch.ones(2)}, newer_than=6)
    (line,) = capfd.readouterr().err.splitlines()
    why = f"no keeper answers at {path}"
    assert f"rank 0 can't restore iteration 7 from memory: SnapshotError: {why}" in line
    assert f"the rank ends, as its launcher can't be told: {why}" in line


@pytest.mark.parametrize(("has_xxhash", "why"), [(True, r"state\['more'\] was not saved"), (False, "xxhash")])
def test_restore_that_fails_is_told_to_the_launcher_with_the_reason(
    keeper: RealKeeper, monkeypatch: pytest.MonkeyPatch, has_xxhash: bool, why: str
) -> None:
    save(7, {"w": torch.ones(2)})
    if not has_xxhash:
        monkeypatch.setattr(digests, "installed", lambda: None)
    with pytest.raises(SnapshotError, match=why):
        restored(7, {"w": torch.zeros(2), "more": torch.zeros(2)})
    wait_until(lambda: isinstance(keeper.heard[-1], RestoreFailed), BOUND_S)
    failed = keeper.heard[-1]
    assert (failed.rank, failed.key) == (0, SnapshotKey(0, 0, 7))
    assert re.search(why, failed.text)
