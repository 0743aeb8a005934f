"""Minutes of the node's ranks, gathered into one line of the event log."""

from __future__ import annotations

from msgspec.structs import replace

from megatron_ft.core.facts.monitor import Minute
from megatron_ft.records.event_log import EventLog

_HOLD_NS = 10_000_000_000


class NodeMinutes:
    """Holds what monitors report of one minute until all have, or for 10 s: one line for all is a third shorter."""

    def __init__(self, log: EventLog, ranks: int) -> None:
        self._log = log
        self._most = ranks
        self._held: dict[tuple[int, int], tuple[int, Minute]] = {}
        """The minute so far, and since when (monotonic ns), by what its ranks have in common."""

    def add(self, minute: Minute, now_ns: int) -> None:
        key = minute.cycle, minute.at_ns
        since_ns, before = self._held.get(key, (now_ns, None))
        whole = minute if before is None else replace(before, ranks=(*before.ranks, *minute.ranks))
        self._held[key] = since_ns, whole
        if len(whole.ranks) >= self._most:
            del self._held[key]
            self._log.write(whole)

    def write_due(self, now_ns: int) -> None:
        """Write what has been held for long."""
        for key in [key for key, (since_ns, _) in self._held.items() if now_ns - since_ns >= _HOLD_NS]:
            self._log.write(self._held.pop(key)[1])

    def write_all(self) -> None:
        while self._held:
            self._log.write(self._held.pop(next(iter(self._held)))[1])
