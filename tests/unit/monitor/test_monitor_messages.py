"""A monitor that tells nonsense is replaced, and nothing that passes the check can hurt the launcher."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.agent import edge
from megatron_ft.core.codec.codec import pack
from megatron_ft.core.config.config import ConfigValues
from megatron_ft.core.diagnosis.exits import find_cause
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.diagnosis.root_cause import find
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages import monitor
from megatron_ft.ipc import monitor_process
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.wire import encode
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.monitors.reports import event_of
from megatron_ft.launcher.monitors.slot import MonitorSlot
from tests.fuzz.hostile import REPORTS, Hostile
from tests.support.reactors import reactor

__all__ = ["reactor"]

NONSENSE = (b"\0\0\0\2{}", encode({"type": "verdict", "cycle": 0}), encode({"type": "attached", "cycle": "x"}))


def with_ranks(ranks: Any) -> dict[str, Any]:
    flying = {"group": "0", "seq": 1, "op": "all_reduce", "ranks": ranks}
    return {"type": "observation", "cycle": 0, "note": {"rank": 1, "in_flight": [flying]}}


@pytest.mark.parametrize("message", REPORTS, ids=lambda message: message["type"])
def test_what_a_monitor_tells_passes(message: dict[str, Any]) -> None:
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
def test_what_it_can_t_tell_is_refused(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        monitor.REPORTS.parse(message)


@pytest.mark.parametrize(
    ("message", "order"),
    [
        ({"type": "stop"}, monitor.Stop()),
        ({"type": "resume", "by": "a newer launcher"}, monitor.Resume()),
        ({"type": "rank_started", "pid": 7}, monitor.RankStarted(7)),
        ({"type": "release", "cycle": 0}, monitor.Release(0)),
        ({"type": "pause", "since_ns": None}, monitor.Pause()),
        ({"type": "pause", "since_ns": 5}, monitor.Pause(5)),
        ({"type": "collect", "cycle": 2, "passive": True, "deadline_ns": 9}, monitor.Collect(2, 9, True)),
    ],
)
def test_orders(message: dict[str, Any], order: monitor.Order) -> None:
    assert monitor.ORDERS.parse(message) == order


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
def test_what_is_no_order(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        monitor.ORDERS.parse(message)
    assert len(str(caught.value)) < 200


def test_what_passes_can_be_worked_with() -> None:
    rng = random.Random(int(os.environ.get("FT_TEST_SEED", "6")))
    hostile, passed = Hostile(rng, REPORTS), dict.fromkeys((message["type"] for message in REPORTS), 0)
    for _ in range(20_000):
        message = json.loads(hostile.framed()[4:])
        try:
            report = monitor.REPORTS.parse(message)
        except ProtocolError:
            continue
        passed[message["type"]] += 1
        match event_of(0, report):
            case edge.FoundHung(verdict=verdict):
                assert find_cause([], [verdict]) is not None
            case edge.EvidenceCollected(note=note):
                json.dumps(pack(note))
                find([note, RankSnapshot(rank=note.rank + 1)], elapsed_s=1.0)
    assert min(passed.values()) > 100, passed


class Fake:
    """Monitors that are played by the test; each process only waits for its end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ends: list[socket.socket] = []

    def spawn(self, *, launcher_fd: int, **_options: object) -> subprocess.Popen[bytes]:
        self.ends.append(socket.socket(fileno=os.dup(launcher_fd)))
        self.processes.append(subprocess.Popen(["sleep", "600"]))
        return self.processes[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = Fake()
    monkeypatch.setattr(monitor_process, "spawn", made.spawn)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for end in made.ends:
        end.close()


def run_until(reactor: Reactor, is_so: Callable[[], bool]) -> None:
    assert reactor.run_until(is_so, deadline_s=None) or is_so()


@pytest.mark.parametrize("sent", NONSENSE)
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_one_that_tells_nonsense_is_replaced_once(
    reactor: Reactor, fake: Fake, tmp_path: Path, sent: bytes, dies: bool
) -> None:
    said: list[str] = []
    heard: list[str] = []
    place = MonitorSlot(
        0,
        socket_path=str(tmp_path / "socket"),
        options=monitor_process.MonitorOptions(config=ConfigValues()),
        reactor=reactor,
        log=EventLog.open(str(tmp_path), role="launcher", run_id="r"),
        say=said.append,
        on_message=lambda _rank, message: heard.append(pack(message)["type"]),
    )
    place.listen()
    place.start()
    fake.ends[0].sendall(encode({"type": "warning", "text": "one"}) + sent + encode({"type": "warning", "text": "two"}))
    if dies:
        fake.processes[0].kill()
        os.waitid(os.P_PID, fake.processes[0].pid, os.WEXITED | os.WNOWAIT)
    run_until(reactor, lambda: len(fake.processes) == 2)
    fake.ends[1].sendall(encode({"type": "warning", "text": "three"}))
    run_until(reactor, lambda: "three" in said)
    assert len(fake.processes) == 2
    # what can't even be read as messages takes with it what came in the same moment
    assert heard == ["warning"] * (1 if sent is NONSENSE[0] else 2)
    assert "two" not in said
    assert fake.processes[0].returncode is not None
    assert len([text for text in said if text.endswith("; replacing it")]) == 1, said
    place.end(0.0)
