"""Saving holds up training for no keeper, no memory and no thread; ranks of other speed have snapshots in common."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.core.memory.retention import Reserve, Reserved
from megatron_ft.core.messages.keeper_messages import BeginSegment, KeeperHello, KeeperWelcome, NotKept
from megatron_ft.rank.base import say
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.memory import keeper_connection, saving
from megatron_ft.rank.memory.keeper_connection import Place
from megatron_ft.rank.memory.saving import Saver
from megatron_ft.rank.memory.snapshot import GivenUpError
from tests.memory.flips import HASHER
from tests.support.keepers import RealKeeper, ScriptedKeeper

BOUND_S = 20.0
OPEN = {KeeperHello: KeeperWelcome(), Reserve: Reserved()}


def saver_at(path: Path, rank: int = 0) -> Saver:
    return Saver(Place(str(path), None, RankInfo(rank, rank, "", 1, rank + 1)), HASHER)


def state() -> dict[str | int, Any]:
    return {"w": torch.ones(1000)}


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    say.forget()
    made = saver_at(tmp_path / "k")
    yield made
    made.disconnect()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealKeeper]:
    keeper = RealKeeper(tmp_path / "k")
    yield keeper
    keeper.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedKeeper]:
    keeper = ScriptedKeeper(tmp_path / "k", dict(OPEN))
    yield keeper
    keeper.close()


def saves(saver: Saver, iteration: int) -> bool:
    saver.save(iteration, state(), 1)
    saver.wait()
    snapshot = saver._snapshot
    return snapshot is not None and snapshot.iteration == iteration and snapshot.error is None


# -- strides ------------------------------------------------------------------------------------------------------


def test_failures_of_any_rank_are_said_and_those_of_a_node_by_its_first_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say.forget()
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    say.warn_of_rank("no memory")
    say.warn_of_rank("no memory")
    say.warn_of_node("no xxhash")
    monkeypatch.setenv("LOCAL_RANK", "0")
    say.warn_of_node("no xxhash")
    lines = capfd.readouterr().err
    assert re.findall("WARNING: (.*)", lines) == ["rank 5: no memory", "rank 5: no xxhash"]


# -- keepers ------------------------------------------------------------------------------------------------------


def test_wait_gives_up_a_snapshot_that_gets_no_segment(
    saver: Saver, scripted: ScriptedKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_GRANT_S", 0.3)
    began_s = time.monotonic()
    assert not saves(saver, 1)
    assert time.monotonic() - began_s < BOUND_S
    assert scripted.count(BeginSegment) == 1
    assert saver._snapshot is not None
    assert isinstance(saver._snapshot.error, GivenUpError)


def test_keeper_that_does_not_answer_holds_up_training_for_a_moment_and_once(
    saver: Saver, scripted: ScriptedKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_ASK_S", 0.1)
    monkeypatch.setattr(keeper_connection, "_HELLO_S", 3.0)
    monkeypatch.setattr(keeper_connection, "_CONNECT_S", 1.0)
    scripted.answers.clear()
    saver.save(1, state(), 1)
    question = saver._question
    assert question is not None
    assert not question.over.is_set()
    saver.save(2, state(), 1)
    assert saver._question is question
    assert not question.over.is_set()  # neither call has waited for the keeper
    assert question.over.wait(BOUND_S)
    saver.save(3, state(), 1)
    assert saver._question is question
    assert scripted.count(KeeperHello) == 1


def test_keeper_that_replaces_another_and_refuses_is_asked_again(saver: Saver, scripted: ScriptedKeeper) -> None:
    scripted.answers[BeginSegment] = NotKept("no memory")
    assert not saves(saver, 1)
    saver._connection.close()
    scripted.answers[Reserve] = NotKept("too little")
    assert not saves(saver, 2)
    scripted.answers[Reserve] = Reserved()
    assert not saves(saver, 3)
    assert scripted.count(Reserve) == 3
    assert [each.iteration for each in scripted.requests if isinstance(each, BeginSegment)] == [1, 3]


# -- pressure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. 7 MiB"), MemoryError()])
def test_copy_without_memory_costs_one_snapshot_and_not_the_training(
    saver: Saver, real: RealKeeper, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise error

    assert saves(saver, 1)
    with monkeypatch.context() as patched:
        patched.setattr(saver._staging._plain, "begin", fail)
        assert not saves(saver, 2)
        assert not saves(saver, 3)
    assert capfd.readouterr().err.count("a memory checkpoint is given up, training goes on") == 1
    assert saves(saver, 4)


def test_thread_that_cannot_start_costs_one_snapshot_and_not_the_training(
    saver: Saver, real: RealKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert not saves(saver, 1)
    assert saves(saver, 2)


def begun(saver: Saver, monkeypatch: pytest.MonkeyPatch, iterations: Iterable[int], every: Any) -> list[int]:
    """The iterations of which a snapshot begins, where each is over at once."""
    found: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(saver, "_begin", lambda iteration, _: found.append(iteration))
        for iteration in iterations:
            saver.save(iteration, state(), every)
    return found


def test_interval_of_the_caller_is_what_all_its_iterations_have_in_common(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun(saver, monkeypatch, (40, 50, 60), "given") == [40, 50, 60]
    saver._stride = 2
    assert begun(saver, monkeypatch, (70, 80), "given") == [80]
