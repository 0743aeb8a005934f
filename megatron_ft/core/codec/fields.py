"""Types of the fields of messages and records, with their bounds and units; a peer or a file may hold anything."""

from __future__ import annotations

from typing import Annotated, Any

from megatron_ft.core.codec.codec import Between, Form
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.printable import shown

__all__ = ["LATEST_NS", "Count", "Cycle", "IntList", "LocalRank", "Moment", "Pid", "Rank", "Seconds", "WorldSize"]

_MOST = 2**62
LATEST_NS = 2**60
"""36 years after boot; with the offset to the wall clock it still is an int64."""

Count = Annotated[int, Between(0, _MOST, "count")]
Rank = Annotated[int, Between(0, 10**7, "global rank")]
WorldSize = Annotated[int, Between(0, 10**6, "ranks")]  # a report lists those whose logs are missing
LocalRank = Annotated[int, Between(0, 10**7, "local rank")]
Cycle = Annotated[int, Between(0, _MOST, "cycle")]
Pid = Annotated[int, Between(1, 2**22, "process id")]  # the most that the kernel gives
Moment = Annotated[int, Between(0, LATEST_NS, "ns, monotonic")]
Seconds = Annotated[float, Between(0, _MOST, "s")]


def _list(value: Any) -> list[int]:
    if type(value) is not list:
        raise ProtocolError(shown(value))
    return value


IntList = Annotated[list[int], Form(_list, lambda value: value)]
"""What is in it is seen when it becomes an array: a log has millions of them."""
