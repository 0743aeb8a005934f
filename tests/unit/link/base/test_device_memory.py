"""Device memory of processes that have ended: what is waited for, and how long."""

from __future__ import annotations

import pytest

from megatron_ft.link.base import device_memory as core
from megatron_ft.link.base.device_memory import Holding

HELD = Holding(0, 7, 3 << 30)


def test_memory_that_ended_processes_hold_is_the_only_one_awaited() -> None:
    listed = [Holding(0, 5), HELD, Holding(1, 7), Holding(1, 8)]
    assert core.held_by(listed, {7, 9}) == [HELD, Holding(1, 7)]


def test_the_wait_is_bounded() -> None:
    assert core.look_again_s([], 0.0) is core.look_again_s([HELD], core.LONGEST_WAIT_S) is None
    waited_s, pauses_s = 0.0, list[float]()
    while (pause_s := core.look_again_s([HELD], waited_s)) is not None:
        waited_s += pause_s
        pauses_s.append(pause_s)
    assert waited_s == pytest.approx(core.LONGEST_WAIT_S)
    assert len(pauses_s) < 60
    assert pauses_s[0] < 0.05


def test_held_memory_is_described_in_words() -> None:
    assert core.describe([HELD, Holding(1, 8)]) == "process 7 on GPU 0 (3.0 GiB), process 8 on GPU 1"
    assert core.describe([HELD] * 6).endswith("(3.0 GiB) and 2 more")
