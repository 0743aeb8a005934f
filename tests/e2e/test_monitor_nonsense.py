"""A monitor that tells nonsense is replaced."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.config.config import ConfigValues
from megatron_ft.launcher.processes.monitors import MonitorSlot
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import encode
from megatron_ft.monitor import process as monitor_process
from megatron_ft.records.event_log import EventLog

NONSENSE = (b"\0\0\0\2{}", encode({"type": "verdict", "cycle": 0}), encode({"type": "attached", "cycle": "x"}))


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
def test_monitor_that_sends_nonsense_is_replaced_once(
    reactor: Reactor, fake: Fake, tmp_path: Path, sent: bytes, dies: bool
) -> None:
    said: list[str] = []
    place = MonitorSlot(
        0,
        path=str(tmp_path / "socket"),
        options=monitor_process.MonitorOptions(config=ConfigValues()),
        reactor=reactor,
        log=EventLog.open(str(tmp_path), role="launcher", run_id="r"),
        say=said.append,
        on_event=lambda _event: None,
    )
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
    assert [text for text in said if text in ("one", "two", "three")] == ["one", "three"][sent is NONSENSE[0] :]
    run_until(reactor, lambda: fake.processes[0].returncode is not None)
    assert len([text for text in said if text.endswith("; replacing it")]) == 1, said
    place.end(0.0)
