"""Addresses behind a name, in the order to try them: from look-ups, and earlier connections. Pure."""

from __future__ import annotations

from megatron_ft.ipc.net.tcp import Target

_KEPT_S = 60.0
"""Seconds for which the result of a late look-up, or of the last connection, may be used."""


class HostAddresses:
    """By ``host:port``. A look-up may take longer than an attempt to connect, and one of several addresses be silent.

    What is remembered is used for one attempt, so that a name that has moved is looked up again soon.
    """

    def __init__(self) -> None:
        self._remembered: dict[str, tuple[float, list[Target]]] = {}
        self._silent: dict[str, Target] = {}

    def take(self, address: str, now_s: float) -> list[Target]:
        """Return the addresses to try now, in order; empty if the name has to be looked up."""
        at_s, targets = self._remembered.pop(address, (now_s, []))
        return self.in_order(address, targets) if now_s - at_s <= _KEPT_S else []

    def in_order(self, address: str, targets: list[Target]) -> list[Target]:
        """These, beginning after the one that was silent last."""
        silent = self._silent.get(address)
        after = targets.index(silent) + 1 if silent in targets else 0
        return [*targets[after:], *targets[:after]]

    def remember(self, address: str, targets: list[Target], now_s: float) -> None:
        """For the next attempt: the result of a look-up that came late, or where a connection has ended that worked."""
        self._remembered[address] = now_s, targets

    def silent(self, address: str, target: Target) -> None:
        """No coordinator answered there in time; the addresses after this one weren't tried."""
        self._silent[address] = target
