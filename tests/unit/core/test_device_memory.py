"""Device memory of processes that have ended: what is waited for, and how long."""

from __future__ import annotations

import pytest

from megatron_ft.core import device_memory as core
from megatron_ft.core.device_memory import Holding, MemoryStep

HELD = Holding(0, 7, 3 << 30)


def test_memory_that_ended_processes_hold_is_the_only_one_awaited() -> None:
    listed = [Holding(0, 5), HELD, Holding(1, 7), Holding(1, 8)]
    assert core.held_by(listed, {7, 9}) == [HELD, Holding(1, 7)]


def test_the_wait_is_bounded() -> None:
    assert core.judge([], 0.0) is core.judge([], 99.0) is MemoryStep.GO_ON
    assert core.judge([HELD], 0.0) is MemoryStep.LOOK_AGAIN
    assert core.judge([HELD], core.LONGEST_WAIT_S) is MemoryStep.GIVE_UP
    waited_s, looks = 0.0, 0
    while core.judge([HELD], waited_s) is MemoryStep.LOOK_AGAIN:
        waited_s, looks = waited_s + core.look_again_s(waited_s), looks + 1
    assert waited_s == pytest.approx(core.LONGEST_WAIT_S)
    assert looks < 60
    assert core.look_again_s(0.0) < 0.05


def test_held_memory_is_described_in_words() -> None:
    assert core.describe([HELD, Holding(1, 8)]) == "process 7 on GPU 0 (3.0 GiB), process 8 on GPU 1"
    assert core.describe([HELD] * 6).endswith("(3.0 GiB) and 2 more")
