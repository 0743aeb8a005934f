"""Connections to the coordinator that haven't identified themselves: how many there may be, and which goes first."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass

MOST = 256
"""Connections that haven't proved that they know the secret (without a secret: haven't said hello), beyond one for each
that has: when thousands of launchers start at once, the listener's queue is emptied faster than each can answer."""
MOST_BYTES = 16 << 20
"""Unread bytes of all of them together. The largest legal hello is as large as any message (1 MiB): what an earlier
coordinator's decision says of thousands of nodes is in it. All of them at that size would be 256 MiB. With 16 MiB for
all, a hello of 64 KiB always has room, and a larger one unless a flood wants it."""
GRACE_S = 3.0
"""Seconds that a connection has to identify itself, even if others wait for its place."""
_SUSPECT_S = 60.0
_MOST_SUSPECTS = 4096


@dataclass(slots=True)
class _Stranger:
    source: str
    since_s: float
    buffered: int = 0


class Strangers:
    """A bounded number of them. When others wait, the oldest of the address with the most of them makes room.

    So a flood from a few addresses displaces only itself, and a launcher on another host is let in. A launcher that
    shares its address with a flood (a host shared by users, NAT) has the time that `MOST` newer connections need to
    come; it connects again when that was too short.

    Each has `GRACE_S`, while others wait in the listener's queue: a slow launcher is no flood. An address that let this
    time pass has no grace for a minute, so that the queue is soon empty.
    """

    def __init__(self) -> None:
        self._all: dict[int, _Stranger] = {}
        self._counts: Counter[str] = Counter()
        self._suspects: dict[str, float] = {}
        """Addresses without grace, and until when."""
        self._buffered = 0

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def __len__(self) -> int:
        return len(self._all)

    def are_full(self, known: int) -> bool:
        """Return True if one has to go before another one is let in. ``known``: connections that are no strangers."""
        return len(self._all) >= MOST + known

    def add(self, number: int, source: str, now_s: float) -> None:
        """Count a connection from that `source`."""
        self._all[number] = _Stranger(source, now_s)
        self._counts[source] += 1

    def discard(self, number: int) -> None:
        """Count it no more: it has identified itself, or is closed."""
        stranger = self._all.pop(number, None)
        if stranger is None:
            return
        self._buffered -= stranger.buffered
        self._counts[stranger.source] -= 1
        if not self._counts[stranger.source]:
            del self._counts[stranger.source]

    def displaceable(self, now_s: float) -> int | None:
        """Return the connection to close in favour of another one; None if that one has to wait until ``relief_s``."""
        number = self._oldest_of_most()
        if number is None:
            return None
        stranger = self._all[number]
        is_suspect = self._suspects.get(stranger.source, 0.0) > now_s
        return number if is_suspect or now_s - stranger.since_s >= GRACE_S else None

    def displace(self, number: int, now_s: float) -> str:
        """Note that a connection is closed in favour of another one; return its address, which has no grace for now."""
        source = self._all[number].source
        self._suspects.pop(source, None)
        if len(self._suspects) >= _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects[source] = now_s + _SUSPECT_S
        self.discard(number)
        return source

    @property
    def relief_s(self) -> float:
        """Latest time at which the next stranger may be displaced."""
        number = self._oldest_of_most()
        return 0.0 if number is None else self._all[number].since_s + GRACE_S

    def buffers(self, number: int, size: int) -> int | None:
        """Note the unread bytes of a connection; return the connection to close if all have too many, else None."""
        stranger = self._all.get(number)
        if stranger is None:
            return None
        self._buffered += size - stranger.buffered
        stranger.buffered = size
        if self._buffered <= MOST_BYTES:
            return None
        return max(self._all, key=lambda each: self._all[each].buffered)

    def _oldest_of_most(self) -> int | None:
        """Connections of the address with the most of them; of several such addresses, of all."""
        if not self._all:
            return None
        most = max(self._counts.values())
        return next(number for number, each in self._all.items() if self._counts[each.source] == most)


def source_of(host: str) -> str:
    """Return what counts as one address: of IPv6 the first 64 bits, which one host may have all of."""
    if host.startswith("::ffff:") and "." in host:
        return host.removeprefix("::ffff:")
    if ":" not in host:
        return host
    return str(ipaddress.IPv6Network((host.partition("%")[0], 64), strict=False))
