"""Thousands of stand-in launchers, without ranks, and one real coordinator, on loopback: how long until they have met.

python tests/bench/control.py 100 1000          # so many launchers each, with a secret: every frame has a MAC
python tests/bench/control.py 100 --open        # without a secret
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ft.job import service as service_module
from megatron_ft.job.__main__ import prepare_process
from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.service import Service
from megatron_ft.link import tcp
from megatron_ft.link.linux.process_setup import raise_file_limit
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secret import read_secret
from megatron_ft.link.wire import encode
from tests.bench.stand_ins import StandIns

_PROCESSES = 2
_BOUND_S = 60.0
_ME = str(Path(__file__).resolve())


def _child(address: str, first: int, last: int, total: int) -> None:
    """In a process of its own: commands come as lines, answers go as lines."""
    raise_file_limit()
    stand_ins = StandIns(address, range(first, last), total, secret=read_secret(os.environ))
    gc.disable()  # they aren't what is measured
    print(json.dumps({"ready": last - first}), flush=True)
    for line in sys.stdin:
        command, argument = line.split()
        is_there = True
        if command == "start":
            stand_ins.start()
        if command == "lose":
            stand_ins.lose(int(argument))
        if command == "idle":
            stand_ins.run_for(float(argument))
        if command == "cycle":
            is_there = stand_ins.run_until_in(int(argument), _BOUND_S)
        print(json.dumps({"last_s": stand_ins.last_s if is_there else None}), flush=True)


def _usage(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _coordinator(fd: int, total: int) -> None:
    """As `python -m megatron_ft.job`."""
    prepare_process()
    service_module.MOST_STRANGERS = total  # all launchers have one address here
    rules = m.Rules(min_nodes=total - 1, max_nodes=total - 1, max_restarts=10)  # one is a spare
    machine = Coordinator("bench", m.JobDefinition("bench", rules), now_s=time.monotonic(), parts=LEADER_PARTS)
    nowhere = open(os.devnull, "wb")  # noqa: SIM115 - as long as the process
    reactor = Reactor()
    _service = Service(
        reactor,
        machine,
        listener=socket.socket(fileno=fd),
        secret=read_secret(os.environ),
        keep=lambda record: nowhere.write(encode(record)) and None,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    while True:
        reactor.run_once(None)


class _Children:
    """Processes that take a line and answer with one."""

    def __init__(self, commands: list[list[str]], environment: dict[str, str] | None = None) -> None:
        self._all = [
            subprocess.Popen(
                [sys.executable, *each],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for each in commands
        ]
        self._answers(self._all)

    def ask(self, line: str, *, first_only: bool = False) -> float | None:
        """When the last of them was done; None if it wasn't in time."""
        asked = self._all[:1] if first_only else self._all
        for child in asked:
            assert child.stdin is not None
            child.stdin.write(f"{line}\n")
            child.stdin.flush()
        found = [answer["last_s"] for answer in self._answers(asked)]
        return None if None in found else max(found)

    def _answers(self, asked: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
        return [json.loads(child.stdout.readline()) for child in asked if child.stdout is not None]

    def end(self) -> None:
        """All of them."""
        for child in self._all:
            child.kill()
        for child in self._all:
            child.communicate()


def measure(launchers: int, *, has_secret: bool = True) -> dict[str, float | None]:
    """Meet, lose one, meet again, stay. Seconds, and shares of one core; None for what never came.

    ``*_cpu_s``: CPU seconds of the coordinator. The stand-ins share the machine with it, and on a busy one, or with few
    cores, the other seconds say more about them.
    """
    listener = tcp.listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.set_inheritable(True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FT_SECRET")}
    if has_secret:
        environment["FT_SECRET"] = os.urandom(16).hex()
    words = [sys.executable, _ME, "--coordinator", str(listener.fileno()), str(launchers)]
    coordinator = subprocess.Popen(words, pass_fds=[listener.fileno()], env=environment)
    listener.close()
    size = -(-launchers // _PROCESSES)
    spans = [(first, min(first + size, launchers)) for first in range(0, launchers, size)]
    commands = [[_ME, "--child", address, *map(str, span), str(launchers)] for span in spans]
    children = _Children(commands, environment)
    try:
        return _measure(children, coordinator.pid)
    finally:
        children.end()
        coordinator.kill()
        coordinator.wait()


def _measure(children: _Children, coordinator: int) -> dict[str, float | None]:
    def used() -> tuple[float, float]:
        return time.monotonic(), _usage(coordinator)

    children.ask("idle 0.5")  # the coordinator has loaded what it needs
    began = used()
    children.ask("start 0")
    met_s = children.ask("cycle 0")
    children.ask("idle 1")
    met = used()
    children.ask("lose 1", first_only=True)
    again_s = children.ask("cycle 1")
    children.ask("idle 1")
    before = used()
    children.ask("idle 5.0")
    after = used()
    return {
        "meet_s": None if met_s is None else met_s - began[0],
        "meet_cpu_s": met[1] - began[1],
        "again_s": None if again_s is None else again_s - met[0],
        "again_cpu_s": before[1] - met[1],
        "steady_cpu_share": (after[1] - before[1]) / (after[0] - before[0]),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], *map(int, sys.argv[3:6]))
    elif sys.argv[1:2] == ["--coordinator"]:
        _coordinator(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sizes = [each for each in sys.argv[1:] if each != "--open"]
        for number in map(int, sizes or ["100", "1000"]):
            figures = measure(number, has_secret="--open" not in sys.argv)
            shown = {name: value if value is None else round(value, 3) for name, value in figures.items()}
            print(number, shown, flush=True)
