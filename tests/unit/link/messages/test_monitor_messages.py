"""What a monitor and its launcher tell each other passes the check, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.messages import monitor_messages
from megatron_ft.link.messages.rank_messages import FROM_RANK
from tests.fuzz.hostile import REPORTS
from tests.support.arrived import arrived


def with_ranks(ranks: Any) -> dict[str, Any]:
    flying = {"group": "0", "seq": 1, "op": "all_reduce", "ranks": ranks}
    return {"type": "observation", "cycle": 0, "note": {"rank": 1, "in_flight": [flying]}}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({**REPORTS[0], "pid": True}, "attached: Expected `int`, got `bool` - at `[$].pid`"),
        ({**REPORTS[1], "at_ns": 1.5}, "first_step: Expected `int`, got `float` - at `[$].at_ns`"),
        ({**REPORTS[2], "elapsed_s": float("nan")}, "verdict: Expected `float` >= 0.0 - at `[$].elapsed_s`"),
        ({**REPORTS[2], "section": ["step"]}, "verdict: .* - at `[$].section`"),
        ({**REPORTS[2], "rank": -1}, "verdict: Expected `int` >= 0 - at `[$].rank`"),
        ({"type": "observation", "cycle": 0}, "observation: Object missing required field `note`"),
        (
            {**REPORTS[5], "note": {"rank": 1, "frame": 3}},
            "observation: Expected `str`, got `int` - at `[$].note.frame`",
        ),
        ({**REPORTS[5], "note": {}}, "observation: Object missing required field `rank` - at `[$].note`"),
        (with_ranks({"range": [0, 1 << 62, 1]}), "observation: a dict - at `[$].note.in_flight.0..ranks`"),
        (with_ranks([0.5]), "observation: a list - at `[$].note.in_flight.0..ranks`"),
        (
            {**REPORTS[5], "note": {"rank": 1, "in_flight": {}}},
            "observation: Expected `array`, got `object` - at `[$].note.in_flight`",
        ),
        ({"type": "nonsense"}, "unknown message 'nonsense'"),
    ],
)
def test_malformed_report_of_a_monitor_is_refused(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        monitor_messages.REPORTS.parse(arrived(message))


@pytest.mark.parametrize("state_path", ["x" * 4097, "a\0b", 7, None])
def test_a_hello_with_a_path_that_no_file_can_have_is_refused(state_path: object) -> None:
    said = {"type": "hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}
    for path in ("x" * 4096, "/a0\\\n\udcff"):
        assert FROM_RANK.parse(arrived({**said, "state_path": path})).state_path == path
    with pytest.raises(ProtocolError, match=r"hello: .* - at `[$].state_path`"):
        FROM_RANK.parse(arrived({**said, "state_path": state_path}))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "unknown"},
        {"type": "guard_group"},
        {"type": "guard_group", "pid": 0},
        {"type": "guard_group", "pid": -1},
        {"type": "guard_group", "pid": True},
        {"type": "guard_group", "pid": 2**40},
        {"type": "release", "cycle": "0"},
        {"type": "collect", "cycle": 0, "passive": 1, "deadline_ns": 1},
        {"type": "collect", "cycle": 0, "passive": False},
        {"type": "pause", "since_ns": [[]]},
        {"type": "x" * 100_000},
    ],
)
def test_malformed_order_of_a_launcher_is_refused_in_a_short_message(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        monitor_messages.ORDERS.parse(arrived(message))
    assert len(str(caught.value)) < 200
