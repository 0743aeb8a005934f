"""Which addresses behind a name to connect to, and in which order: from look-ups, and earlier connections. Pure."""

from __future__ import annotations

from megatron_ft.ipc.net.tcp import Target

_KEPT_S = 60.0
"""So long an answer that came too late is used for the next attempt."""


class HostAddresses:
    """By ``host:port``. A look-up may take longer than an attempt, and of several addresses one may be silent.

    The address where a coordinator answered last is tried alone, without a look-up: a connection that broke is there
    again at once. If it isn't, the name is looked up again.
    """

    def __init__(self) -> None:
        self._late: dict[str, tuple[float, list[Target]]] = {}
        self._answered: dict[str, Target] = {}
        self._silent: dict[str, Target] = {}

    def known(self, address: str, now_s: float) -> list[Target] | None:
        """Those to try now, in order; None: the name has to be looked up."""
        if address in self._answered:
            return [self._answered[address]]
        at_s, targets = self._late.pop(address, (now_s, []))
        if not targets or now_s - at_s > _KEPT_S:
            return None
        return self.in_order(address, targets)

    def in_order(self, address: str, targets: list[Target]) -> list[Target]:
        """These, but first the one that follows the one that was silent last."""
        silent = self._silent.get(address)
        after = targets.index(silent) + 1 if silent in targets else 0
        return [*targets[after:], *targets[:after]]

    def keep(self, address: str, targets: list[Target], now_s: float) -> None:
        """This answer came when another address was being tried."""
        self._late[address] = now_s, targets

    def answered(self, address: str, target: Target) -> None:
        """A coordinator speaks there."""
        self._answered[address] = target
        self._silent.pop(address, None)

    def unanswered(self, address: str, target: Target, *, silent: bool) -> None:
        """None speaks there; ``silent``: the attempt was given up, and others of this name weren't tried."""
        self._answered.pop(address, None)
        if silent:
            self._silent[address] = target
