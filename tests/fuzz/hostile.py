"""Hostile input for our sockets: mutations of each message of a vocabulary, broken frames, and bytes that are none.

All of it follows from the seed of the generator that is handed in.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import inspect

from megatron_ft.link.base.codec import name_of
from megatron_ft.link.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION

Message = dict[str, Any]

_WORDS = ("", "x", "\x00", "\x1b[2J", "\ud800", "é" * 40, "step", "NaN", "-1", "\u202e", "a\nb", "x" * 5000)
_MEANT = ("Continue", "0" * 32, "0" * 64)
"""Values of fields that ask for a pattern."""
_NUMBERS = (-1, 0, 1, 2**31, 2**32 - 1, 2**63, 2**64, -(2**64), 10**400, 0.5, -0.0, 1e308, 1e-320)
_ODD = (None, True, False, float("nan"), float("inf"), float("-inf"), [], {}, [[]], {"": {}}, [None])
_NOT_OURS = (
    *(b"GET / HTTP/1.1\r\n\r\n", b"\0", b"\0\0\0\0", b"\0\0\0\2{}", b"\0\0\0\4null", b"\0\0\0\3\xff\xfe\xfd"),
    *(struct.pack(">I", 60_000) + b'{"a":' * 12_000, struct.pack(">I", MAX_MESSAGE_BYTES) + b"{", b"\xff" * 4),
)
_HUGE_ONE_IN = 3000
_MANY = 150_000  # of them, as JSON writes it, are not quite too long a message


def examples(kinds: Iterable[Any]) -> list[Message]:
    """Return a valid message of each of these classes, in which every field has a value, and one without defaults."""
    found = []
    for kind in kinds:
        fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
        for some in (fields, [field for field in fields if field.required]):
            found.append({"type": name_of(kind), **{field.encode_name: _example(field.type) for field in some}})
    return found


def _example(kind: inspect.Type) -> Any:
    match kind:
        case inspect.Metadata(type=inner):
            return _example(inner)
        case inspect.StrType(pattern=str(pattern)):
            return next(word for word in (*_WORDS, *_MEANT) if re.search(pattern, word))
        case inspect.StructType(fields=fields, array_like=True):
            return [_example(field.type) for field in fields]
        case inspect.StructType(fields=fields):
            return {field.encode_name: _example(field.type) for field in fields}
        case inspect.DictType(key_type=key, value_type=value):
            return {_example(key): _example(value)}
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [_example(item)]
        case inspect.TupleType(item_types=items):
            return [_example(item) for item in items]
        case inspect.UnionType(types=types):
            return _example(types[0])
        case inspect.EnumType(cls=enum):
            return next(iter(enum)).value
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.CustomType(cls=cls):
            return {"range": [0, 4, 1]} if cls is range else {}
    return {inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True, inspect.StrType: ""}.get(type(kind))


class Hostile:
    """Makes messages out of ``seeds``; those that ``allows`` doesn't let pass are left out."""

    def __init__(
        self, rng: random.Random, seeds: Iterable[Message], allows: Callable[[Message], bool] = lambda _message: True
    ) -> None:
        self._rng = rng
        self._seeds = tuple(seeds)
        self._allows = allows

    def data(self, count: int) -> bytes:
        """So many messages. Half of the time they pass the reader of frames, or nothing behind it would be reached."""
        is_framed = self._rng.random() < 0.5
        return b"".join(self.framed() if is_framed else self._frame() for _ in range(count))

    def framed(self) -> bytes:
        """A message of our protocol; what it says is another matter."""
        message = {**self.message(), "v": PROTOCOL_VERSION, "fds": 0}
        if not isinstance(message.get("type"), str):
            message["type"] = self._rng.choice(self._seeds)["type"]
            if not self._allows(message):
                return self.framed()
        body = json.dumps(message).encode()
        return struct.pack(">I", len(body)) + body

    def _frame(self) -> bytes:
        """A message in another encoding, what is none, or a frame that is cut, longer, or has other bytes in it."""
        rng, body = self._rng, json.dumps(self.message(), ensure_ascii=False).encode("utf-8", "surrogatepass")
        changed = bytearray(struct.pack(">I", len(body)) + body)
        match rng.randrange(6):
            case 0:
                return rng.choice(_NOT_OURS)
            case 1:
                return rng.randbytes(rng.randrange(1, 300))
            case 2:
                changed[:4] = struct.pack(">I", max(0, len(body) + rng.choice((-5, -1, 1, 7, 1000))))
            case 3:
                del changed[rng.randrange(4, len(changed)) :]
            case 4:
                for _ in range(rng.randrange(1, 4)):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def message(self) -> Message:
        """A mutated one that is allowed."""
        rng = self._rng
        while True:
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
            if self._allows(message):
                return message

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON can hold."""
        rng = self._rng
        match rng.randrange(7 if depth < 3 else 4):
            case 0:
                return rng.choice(_WORDS)
            case 1:
                return rng.choice(_NUMBERS)
            case 2:
                return rng.choice(_ODD)
            case 3:
                return rng.getrandbits(rng.randrange(1, 80)) - rng.getrandbits(20)
            case 4:
                return [self.value(depth + 1) for _ in range(rng.randrange(4))]
            case 5:
                return {rng.choice(_WORDS): self.value(depth + 1) for _ in range(rng.randrange(4))}
        value: Any = rng.choice(self._seeds).get("type")
        # as deep as the reader's recursion goes, give or take a little
        for _ in range(rng.choice((10, 300, 600, 900)) if rng.random() < 0.1 else 0):
            value = [value]
        return value
