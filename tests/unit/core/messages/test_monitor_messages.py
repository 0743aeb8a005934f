"""What a monitor and its launcher tell each other passes the check, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ft.core.codec import pack
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages import monitor
from megatron_ft.core.messages.monitor import Pause, Resume
from megatron_ft.core.messages.rank import FROM_RANK
from megatron_ft.core.timeouts.exchange import Arm, Armed, Moment, Survey
from tests.fuzz.hostile import REPORTS


def with_ranks(ranks: Any) -> dict[str, Any]:
    flying = {"group": "0", "seq": 1, "op": "all_reduce", "ranks": ranks}
    return {"type": "observation", "cycle": 0, "note": {"rank": 1, "in_flight": [flying]}}


@pytest.mark.parametrize("message", REPORTS, ids=lambda message: message["type"])
def test_report_of_a_monitor_passes_the_check(message: dict[str, Any]) -> None:
    said = json.loads(json.dumps(pack(monitor.REPORTS.parse(message))))
    assert all(said[name] == value for name, value in message.items() if name != "note" and value is not None)
    assert monitor.REPORTS.parse(said) == monitor.REPORTS.parse(message)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({**REPORTS[0], "pid": True}, "attached has pid = True"),
        ({**REPORTS[1], "at_ns": 1.5}, "first_step has at_ns = 1.5"),
        ({**REPORTS[2], "elapsed_s": float("nan")}, "verdict has elapsed_s = nan"),
        ({**REPORTS[2], "section": ["step"]}, "verdict has section = a list"),
        ({**REPORTS[2], "rank": -1}, "verdict has rank = -1"),
        ({"type": "observation", "cycle": 0}, "observation has no note"),
        ({**REPORTS[5], "note": {"rank": 1, "frame": 3}}, "observation has note = rank_snapshot has frame = 3"),
        ({**REPORTS[5], "note": {}}, "observation has note = rank_snapshot has no rank"),
        (with_ranks({"range": [0, 1 << 62, 1]}), "rank_snapshot has in_flight = collective has ranks = a dict"),
        (with_ranks([0.5]), "collective has ranks = a list"),
        ({**REPORTS[5], "note": {"rank": 1, "in_flight": {}}}, "has in_flight = a dict"),
        ({"type": "nonsense"}, "unknown type 'nonsense'"),
    ],
)
def test_malformed_report_of_a_monitor_is_refused(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        monitor.REPORTS.parse(message)


LEARNED = Armed(5.0, 30.0, 20.0, enforced=False)


@pytest.mark.parametrize("order", [Survey(3, 7, Moment.SAVE), Arm(3, {"step": LEARNED}, {"heartbeat": 2.0}), Arm(3)])
def test_orders_to_learn_and_to_arm_pass_as_they_are(order: Survey | Arm) -> None:
    assert monitor.ORDERS.parse(json.loads(json.dumps(pack(order)))) == order


@pytest.mark.parametrize("state_path", ["x" * 4097, "a\0b", 7, None])
def test_a_hello_with_a_path_that_no_file_can_have_is_refused(state_path: object) -> None:
    said = {"type": "hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}
    assert FROM_RANK.parse({**said, "state_path": "x" * 4096, "learns": True}).learns
    with pytest.raises(ProtocolError, match="hello has state_path"):
        FROM_RANK.parse({**said, "state_path": state_path})


@pytest.mark.parametrize(
    ("message", "order"),
    [
        ({"type": "stop"}, monitor.Stop()),
        ({"type": "resume", "by": "a newer launcher"}, Resume()),
        ({"type": "guard_group", "pid": 7}, monitor.GuardGroup(7)),
        ({"type": "release", "cycle": 0}, monitor.Release(0)),
        ({"type": "pause", "since_ns": None}, Pause()),
        ({"type": "pause", "since_ns": 5}, Pause(5)),
        ({"type": "collect", "cycle": 2, "passive": True, "deadline_ns": 9}, monitor.Collect(2, 9, True)),
    ],
)
def test_order_of_a_launcher_is_parsed(message: dict[str, Any], order: monitor.Order) -> None:
    assert monitor.ORDERS.parse(message) == order


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
        monitor.ORDERS.parse(message)
    assert len(str(caught.value)) < 200
