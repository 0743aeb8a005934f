"""Hostile input for our sockets: mutations of real messages, frames that aren't any, and connections gone wrong.

All of it follows from the seed of the generator that is handed in.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatron_ft.link.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from tests.support.agents import HANG
from tests.support.arrived import arrived

Message = dict[str, Any]

HELLOS: tuple[Message, ...] = (
    {"type": "hello", "cycle": 0, "rank": 0, "warmup_iterations": 0, "user_code_ns": 0},
    {"type": "hello", "cycle": 7, "rank": 3, "warmup_iterations": 5},
    {"type": "hello", "cycle": 1, "rank": 0, "warmup_iterations": 0, "state_path": "/a/ft_state.json", "learns": True},
    {"type": "hello", "cycle": 2**62, "rank": 10**7, "warmup_iterations": 2**62},
)
REQUESTS: tuple[Message, ...] = (
    {"type": "workload_control", "action": "Continue", "description": "going on", "rank": 0, "pid": 1},
    {"type": "status"},
    {"type": "pause"},
    {"type": "resume"},
)
ORDERS: tuple[Message, ...] = (
    {"type": "release", "cycle": 0},
    {"type": "pause", "since_ns": None},
    {"type": "resume"},
    {"type": "collect", "cycle": 1, "passive": False, "deadline_ns": 1},
    {"type": "survey", "cycle": 0, "number": 1, "moment": "save"},
    {
        "type": "arm",
        "cycle": 0,
        "timeouts": {"step": {"timeout_s": 1e6, "enforced": False}},
        "raised": {"heartbeat": 2.0},
    },
)
"""None ends a rank that isn't found hung, or looks at one: those do what they say, that is no fuzzing."""

_NOTE: Message = {
    "rank": 1,
    "local_rank": 1,
    "host": "n",
    "pid": 77,
    "iteration": 4,
    "section": "step",
    "open_s": 5.5,
    "quiet_s": 5.5,
    "found_hung": True,
    "state": "S",
    "has_stack": True,
    "frame": "a.py:3 step",
    "timeout_s": 5.0,
    "has_collectives": True,
    "enqueued": {"gloo/0": 3},
    "waits_in": "all_reduce",
    "in_flight": [
        {"group": "0", "seq": 3, "op": "all_reduce", "ranks": {"range": [0, 4, 1]}, "backend": "gloo"},
        {"group": "0", "seq": 4, "op": "recv 0<-1", "p2p": True, "backend": "gloo"},
    ],
}
_VERDICT: Message = json.loads(arrived(HANG).body)
REPORTS: tuple[Message, ...] = (
    {"type": "attached", "rank": 1, "cycle": 0, "pid": 77, "user_code_ns": 10**12},
    {"type": "first_step", "rank": 1, "cycle": 0, "at_ns": 10**12, "began_ns": 10**12},
    _VERDICT,
    {**_VERDICT, "section": None, "observed_only": True},
    {"type": "observation", "cycle": 0, "note": _NOTE},
    {"type": "observation", "cycle": 0, "note": {"rank": 1}},
    {"type": "signalled", "rank": 1, "cycle": 0, "pid": 77, "signal": "SIGTERM", "at_ns": 10**12},
    {"type": "warning", "text": "the board was damaged"},
    {"type": "detached", "rank": 1, "cycle": 0, "pid": 77, "at_ns": 10**12},
    {"type": "intervals", "cycle": 0, "saves": 1, "steps": 64, "facts": 257},
)
"""What a monitor tells its launcher."""

_ENDS = ("ShutdownWorkload", "ExcludeThisNode")
_WORDS = ("", "x", "\x00", "\x1b[2J", "\ud800", "é" * 40, "step", "NaN", "-1", "Continue", "\u202e", "a\nb", "x" * 5000)
_NUMBERS = (-1, 0, 1, 2**31, 2**32 - 1, 2**63, 2**64, -(2**64), 10**400, 0.5, -0.0, 1e308, 1e-320)
_ODD: tuple[Any, ...] = (None, True, False, float("nan"), float("inf"), float("-inf"), [], {}, [[]], {"": {}}, [None])
_NOT_OURS = (
    *(b"GET / HTTP/1.1\r\n\r\n", b"\0", b"\0\0\0", b"\xff" * 4, b"\0\0\0\0", b"\0\0\0\2{}", b"\0\0\0\4null"),
    *(b"\0\0\0\3\xff\xfe\xfd", b"\0\0\0\1[", struct.pack(">I", 40_000) + b"[" * 40_000),
    *(struct.pack(">I", 60_000) + b'{"a":' * 12_000, struct.pack(">I", 5000) + b"9" * 5000),
    *(struct.pack(">I", MAX_MESSAGE_BYTES + 1), struct.pack(">I", MAX_MESSAGE_BYTES) + b"{"),
)
_HUGE_ONE_IN = 3000
_MANY = 150_000  # of them, as JSON writes it, are not quite too long a message


class Attack(NamedTuple):
    """One connection: what is written on it, piece by piece, and how it ends."""

    pieces: tuple[bytes, ...]
    messages: int
    fds: int
    """So many descriptors travel with the first piece."""
    ending: str
    """"close", "read" (until the peer has nothing more to say), or "leave" (open, for long)."""


class Hostile:
    """Makes messages out of ``seeds``; those that ``allows`` doesn't let pass are left out."""

    def __init__(
        self, rng: random.Random, seeds: Iterable[Message], allows: Callable[[Message], bool] = lambda _message: True
    ) -> None:
        self._rng = rng
        self._seeds = tuple(seeds)
        self._allows = allows

    def attack(self) -> Attack:
        rng = self._rng
        count = rng.choice((1, 1, 1, 2, 3, 8, 30))
        # half of them pass the reader of frames, or nothing behind it would ever be reached
        framed = rng.random() < 0.5
        data = b"".join(self.framed() if framed else self.frame() for _ in range(count))
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))
        ends = [0, *cuts, len(data)]
        pieces = tuple(data[begin:end] for begin, end in itertools.pairwise(ends) if end > begin)
        fds = rng.randrange(1, 20) if rng.random() < 0.05 else 0
        return Attack(pieces, count, fds, rng.choices(("close", "read", "leave"), (60, 30, 10))[0])

    def framed(self) -> bytes:
        """A message of our protocol; what it says is another matter."""
        message = {**self.message(), "v": PROTOCOL_VERSION, "fds": 0}
        if not isinstance(message.get("type"), str):
            message["type"] = self._rng.choice(self._seeds)["type"]
            if not self._allows(message):
                return self.framed()
        body = json.dumps(message).encode()
        return struct.pack(">I", len(body)) + body

    def frame(self) -> bytes:
        """One message, or what is none, as it goes over the wire."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.15:
            return rng.choice(_NOT_OURS) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 300))
        body = self.body()
        if chance > 0.9:
            return self._broken(body)
        return struct.pack(">I", len(body)) + body

    def body(self) -> bytes:
        """JSON of one message, most often a mutated one."""
        message = self.message()
        encoding = "utf-16" if self._rng.random() < 0.01 else "utf-8"
        return json.dumps(message, ensure_ascii=self._rng.random() < 0.8).encode(encoding, "surrogatepass")

    def message(self) -> Message:
        while True:
            message = self._mutated()
            if self._allows(message):
                return message

    def _mutated(self) -> Message:
        rng = self._rng
        message: Message = {"v": PROTOCOL_VERSION, "fds": 0, **rng.choice(self._seeds)}
        for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
            name = rng.choice([*message, *rng.choice(self._seeds), "new"])
            kind = rng.random()
            if kind < 0.2:
                message.pop(name, None)
            elif kind < 0.3:
                message[str(self.value())[:50]] = message.pop(name, None)
            else:
                message[name] = self.value()
        if rng.randrange(_HUGE_ONE_IN) == 0:
            message[rng.choice(list(message) or ["type"])] = rng.choice("x\u00e9\x1b") * _MANY
        return message

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON can hold."""
        rng = self._rng
        kind = rng.randrange(7 if depth < 3 else 4)
        if kind == 0:
            return rng.choice(_WORDS)
        if kind == 1:
            return rng.choice(_NUMBERS)
        if kind == 2:
            return rng.choice(_ODD)
        if kind == 3:
            return rng.getrandbits(rng.randrange(1, 80)) - rng.getrandbits(20)
        if kind == 4:
            return [self.value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 5:
            return {rng.choice(_WORDS): self.value(depth + 1) for _ in range(rng.randrange(4))}
        return self._nested() if rng.random() < 0.1 else rng.choice(self._seeds).get("type")

    def _nested(self) -> Any:
        """As deep as the reader's recursion goes, give or take a little."""
        value: Any = 0
        for _ in range(self._rng.choice((10, 300, 600, 900))):
            value = [value]
        return value

    def _broken(self, body: bytes) -> bytes:
        rng, length = self._rng, len(body)
        kind = rng.randrange(4)
        if kind == 0:
            return struct.pack(">I", max(0, length + rng.choice((-5, -1, 1, 7, 1000)))) + body
        if kind == 1:
            return struct.pack(">I", length) + body[: rng.randrange(length + 1)]
        changed = bytearray(struct.pack(">I", length) + body)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed) if kind == 2 else bytes(changed[rng.randrange(4) :])


def is_harmless(message: Mapping[str, Any]) -> bool:
    """Whether a request doesn't end the job when it is obeyed."""
    return message.get("action") not in _ENDS
