"""Thousands of stand-in launchers, without ranks, and one real coordinator, on loopback: how long until they have met.

python tests/bench/control.py 100 1000          # so many launchers each
"""

from __future__ import annotations

import json
import mmap
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ft.coordinator.service import Service
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.codec import parse, to_message
from megatron_ft.core.job.coordinator import Coordinator
from megatron_ft.core.job.member import Identity, Member
from megatron_ft.ipc import tcp
from megatron_ft.ipc.secret import Asked, read_secret
from megatron_ft.ipc.wire import encode

__all__ = ["Swarm", "measure"]

_PROCESSES = 2


class _StandIn:
    """One launcher: the real machine, a socket, and ranks that start and end at once."""

    def __init__(self, swarm: Swarm, number: int, identity: Identity) -> None:
        self.swarm = swarm
        self.number = number
        self.member = Member(identity, now_s=time.monotonic(), chance=random.Random(number))
        self.peer: tcp.Peer | None = None
        self.is_connected = False
        self.asked: Asked | None = None
        self.cycle = -1
        self.begun_s = 0.0
        self.place: int | None = None
        self.code: int | None = None
        self.was_ended = False

    def do(self, effects: list[edge.MemberEffect]) -> None:
        """Bring about what the machine asks for."""
        now_s = time.monotonic()
        for effect in effects:
            match effect:
                case edge.Connect(address):
                    self.close()
                    try:
                        self.peer = tcp.connect(*tcp.parse_address(address))
                    except OSError:
                        self.do(self.member.failed(now_s))
                        continue
                    self.is_connected = False
                    self.asked = Asked(self.swarm.secret)
                    self.swarm.selector.register(self.peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
                case edge.Disconnect():
                    self.close()
                case edge.Transmit(message):
                    if self.peer is not None:
                        self.peer.write(encode(to_message(message)))
                        self.peer.flush()
                case edge.OpenStore(held):
                    self.do(self.member.store_opened(held, "127.0.0.1:1", now_s))
                case edge.Begin(held):
                    self.cycle, self.begun_s, self.place = held.decision.cycle, now_s, held.place
                case edge.EndRanks():
                    self.was_ended = True
                    self.do(self.member.ready(now_s))
                case edge.Leave(code):
                    self.code = code
                    self.close()
                case _:
                    pass

    def ready_to(self, events: int) -> None:
        """The socket is readable, or writable."""
        peer = self.peer
        if peer is None:
            return
        if not self.is_connected and events & selectors.EVENT_WRITE:
            self.is_connected = True
            self.swarm.selector.modify(peer.sock, selectors.EVENT_READ, self)
            if self.asked is not None and self.asked.is_done:
                self.do(self.member.opened(time.monotonic()))
        if events & selectors.EVENT_READ:
            try:
                for message in peer.read():
                    self._heard(message)
            except ProtocolError as error:
                print(error, file=sys.stderr)
                peer.is_open = False
            if not peer.is_open and self.peer is peer:
                self.close()
                self.do(self.member.broken(time.monotonic()))

    def _heard(self, message: dict[str, object]) -> None:
        assert self.asked is not None
        if self.asked.is_done:
            self.do(self.member.heard(parse(message), time.monotonic()))
            return
        answer = self.asked.answer(message)
        if answer is not None and self.peer is not None:
            self.peer.write(encode(answer))
            self.peer.flush()
        if self.asked.is_done:
            self.do(self.member.opened(time.monotonic()))

    def close(self) -> None:
        """The connection, if there is one."""
        if self.peer is not None:
            self.swarm.selector.unregister(self.peer.sock)
            self.peer.close()
            self.peer = None


class Swarm:
    """Many of them in one process."""

    def __init__(
        self, address: str, numbers: range, total: int, *, job: str = "bench", can_coordinate: str = ""
    ) -> None:
        """``can_coordinate`` is the address at which the first of them can."""
        self.secret = read_secret(os.environ)
        self.selector = selectors.DefaultSelector()
        rules = m.Rules(min_nodes=total - 1, max_nodes=total - 1, max_restarts=10)  # one is a spare
        self.total = total
        self.all: list[_StandIn] = []
        for number in numbers:
            own = can_coordinate if number == numbers[0] else ""
            who = Identity(job, rules, f"i{number}", f"node{number}", own, (address,), number)
            self.all.append(_StandIn(self, number, who))

    def start(self) -> None:
        """All at once."""
        for each in self.all:
            each.do(each.member.ready(time.monotonic()))
            each.do(each.member.tick(time.monotonic()))

    def run_until_in(self, cycle: int) -> None:
        """Serve until everybody but the spare is in that cycle."""
        spare = self.total - 1 if cycle == 0 else -1
        self.run_until(
            time.monotonic() + 120, lambda: all(each.cycle >= cycle or each.number == spare for each in self.all)
        )

    def run_until(self, deadline_s: float, is_done: object = None) -> None:
        """Serve."""
        sweep_s = 0.0
        while time.monotonic() < deadline_s and not (callable(is_done) and is_done()):
            for key, events in self.selector.select(0.05):
                key.data.ready_to(events)
            now_s = time.monotonic()
            if now_s >= sweep_s:
                sweep_s = now_s + 0.1
                for each in self.all:
                    if each.code is None and each.member.alarm_s <= now_s:
                        each.do(each.member.tick(now_s))


def _child(address: str, first: int, last: int, total: int) -> None:
    """In a process of its own: commands come as lines, answers go as lines."""
    tcp.raise_descriptor_limit()
    swarm = Swarm(address, range(first, last), total)
    print(json.dumps({"ready": last - first}), flush=True)
    for line in sys.stdin:
        command, argument = line.split()
        if command == "start":
            swarm.start()
        if command == "lose":
            for each in [each for each in swarm.all if each.number == int(argument)]:
                each.close()
                swarm.all.remove(each)
        if command == "idle":
            swarm.run_until(time.monotonic() + float(argument))
        if command == "cycle":
            cycle = int(argument)
            swarm.run_until_in(cycle)
        print(json.dumps({"last_s": max(each.begun_s for each in swarm.all)}), flush=True)


def _usage(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _coordinator(fd: int, path: str) -> None:
    """As `python -m megatron_ft.coordinator`, and what it has sent is in a file."""
    tcp.raise_descriptor_limit()
    machine = Coordinator("bench", founds=True, owned=False, now_s=time.monotonic())
    service = Service(socket.socket(fileno=fd), machine, secret=read_secret(os.environ), owner=None)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
        while True:
            service.run_once(max(0.0, machine.alarm_s - time.monotonic()))
            shared[:8] = service.bytes_sent.to_bytes(8, "little")


def measure(launchers: int, *, processes: int = _PROCESSES, idle_s: float = 5.0) -> dict[str, float]:
    """Meet, lose one, meet again, stay. Seconds, shares of one core, and bytes a second."""
    listener = tcp.listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.set_inheritable(True)
    stats = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed below
    stats.write(bytes(8))
    stats.flush()
    me = [sys.executable, str(Path(__file__).resolve())]
    words = [*me, "--coordinator", str(listener.fileno()), stats.name]
    coordinator = subprocess.Popen(words, pass_fds=[listener.fileno()])
    listener.close()
    size = -(-launchers // processes)
    spans = [(first, min(first + size, launchers)) for first in range(0, launchers, size)]
    children = [
        subprocess.Popen(
            [*me, "--child", address, str(first), str(last), str(launchers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, last in spans
    ]

    def sent_bytes() -> int:
        return int.from_bytes(Path(stats.name).read_bytes(), "little")

    def ask(line: str, only: subprocess.Popen[str] | None = None) -> list[dict[str, float]]:
        asked = children if only is None else [only]
        for child in asked:
            assert child.stdin is not None
            child.stdin.write(f"{line}\n")
            child.stdin.flush()
        return [json.loads(child.stdout.readline()) for child in asked if child.stdout is not None]

    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        found: dict[str, float] = {}
        began_s, used_s, sent = time.monotonic(), _usage(coordinator.pid), sent_bytes()
        ask("start 0")
        found["meet_s"] = max(answer["last_s"] for answer in ask("cycle 0")) - began_s
        found["meet_cpu_s"] = _usage(coordinator.pid) - used_s
        found["meet_bytes"] = sent_bytes() - sent
        ask("idle 1")
        began_s = time.monotonic()
        ask("lose 1", children[0])
        found["again_s"] = max(answer["last_s"] for answer in ask("cycle 1")) - began_s
        used_s, sent, began_s = _usage(coordinator.pid), sent_bytes(), time.monotonic()
        ask(f"idle {idle_s}")
        passed_s = time.monotonic() - began_s
        found["steady_cpu_share"] = (_usage(coordinator.pid) - used_s) / passed_s
        found["steady_bytes_s"] = (sent_bytes() - sent) / passed_s
        return found
    finally:
        for process in (*children, coordinator):
            process.kill()
            process.wait()
        stats.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], *map(int, sys.argv[3:6]))
    elif sys.argv[1:2] == ["--coordinator"]:
        _coordinator(int(sys.argv[2]), sys.argv[3])
    else:
        for number in map(int, sys.argv[1:] or ["100", "1000"]):
            figures = measure(number)
            print(number, {name: round(value, 3) for name, value in figures.items()}, flush=True)
