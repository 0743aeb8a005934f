"""What a launcher tells its monitors, checked before it is done."""

from __future__ import annotations

from typing import NamedTuple

from megatron_ft.core.errors import ProtocolError
from megatron_ft.ipc.wire import Message, shown

__all__ = ["Order", "parse"]

_NUMBERS = {"rank_started": ("pid",), "collect": ("cycle", "deadline_ns"), "release": ("cycle",)}
_KINDS = ("stop", "pause", "resume", *_NUMBERS)
_MOST_PID = 2**22  # of the kernel
_MOST = 2**62


class Order(NamedTuple):
    """One order; what doesn't belong to its kind is 0."""

    kind: str
    pid: int = 0
    cycle: int = 0
    deadline_ns: int = 0
    since_ns: int = 0
    """0: from now on."""
    passive: bool = False


def parse(message: Message) -> Order:
    """Check an order.

    Raises:
        ProtocolError: it isn't one.
    """
    kind = message["type"]
    if kind not in _KINDS:
        raise ProtocolError(f"unknown order {shown(kind)}")
    numbers = {name: _number(message, name) for name in _NUMBERS.get(kind, ())}
    if kind == "pause" and message.get("since_ns") is not None:
        numbers["since_ns"] = _number(message, "since_ns")
    passive = message.get("passive", False)
    if not isinstance(passive, bool):
        raise ProtocolError(f"order {kind} has passive={shown(passive)}")
    return Order(kind, passive=passive, **numbers)


def _number(message: Message, name: str) -> int:
    value = message.get(name)
    least, most = (1, _MOST_PID) if name == "pid" else (0, _MOST)
    if type(value) is not int or not least <= value <= most:
        raise ProtocolError(f"order {message['type']} has {name}={shown(value)}")
    return value
