"""What a launcher says to its monitors: done if it is an order, refused in one line if it isn't."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.core.errors import ProtocolError
from megatron_ft.monitor.orders import Order, parse


@pytest.mark.parametrize(
    ("message", "order"),
    [
        ({"type": "stop"}, Order("stop")),
        ({"type": "rank_started", "pid": 7}, Order("rank_started", pid=7)),
        ({"type": "release", "cycle": 0}, Order("release", cycle=0)),
        ({"type": "pause", "since_ns": None}, Order("pause")),
        ({"type": "pause", "since_ns": 5}, Order("pause", since_ns=5)),
        (
            {"type": "collect", "cycle": 2, "passive": True, "deadline_ns": 9},
            Order("collect", cycle=2, passive=True, deadline_ns=9),
        ),
    ],
)
def test_orders(message: dict[str, Any], order: Order) -> None:
    assert parse(message) == order


@pytest.mark.parametrize(
    "message",
    [
        {"type": "unknown"},
        {"type": "rank_started"},
        {"type": "rank_started", "pid": 0},
        {"type": "rank_started", "pid": -1},
        {"type": "rank_started", "pid": True},
        {"type": "rank_started", "pid": 2**40},
        {"type": "release", "cycle": "0"},
        {"type": "collect", "cycle": 0, "passive": 1, "deadline_ns": 1},
        {"type": "collect", "cycle": 0, "passive": False},
        {"type": "pause", "since_ns": [[]]},
        {"type": "x" * 100_000},
    ],
)
def test_what_is_none(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(message)
    assert len(str(caught.value)) < 200
