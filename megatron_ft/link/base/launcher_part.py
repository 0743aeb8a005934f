"""A part of the launcher: one capability, which its machine doesn't know by name. Pure, as the machine is.

The machine routes messages of the leader, and events, by their types to the parts that take them, and the reports of
monitors to all. `launcher.rules.turn.Turn` is one event and its effects, `launcher.rules.node_cycle.NodeCycle` what is
known of the ranks of a cycle on this node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_ft.link.base.codec import PartState


class PartEvent:
    """Base of events that only parts take."""


class PartEffect:
    """Base of effects that are carried out beside the part that asks for them."""


class LauncherPart:
    """A part of one launcher. ``HEARS``: messages and events that it takes, also those of earlier cycles."""

    HEARS: ClassVar[Any] = ()

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next ``tick``."""
        return None

    def status(self) -> Sequence[PartState]:
        """Return what the node's next `Ready` says of this part."""
        return ()

    def begin(self, cycle: Any, turn: Any) -> None:
        """Serve the ranks of this cycle from now on; their numbers are known once the nodes have met."""

    def started(self, turn: Any) -> None:
        """Take note that all ranks were created."""

    def hear(self, event: Any, turn: Any) -> None:
        """Take a message or event of ``HEARS``."""

    def hear_monitor(self, local_rank: int, report: Any, turn: Any) -> None:
        """Take the report of a monitor, maybe on a rank of an earlier cycle."""

    def exited(self, end: Any, turn: Any) -> None:
        """Take the exit of a rank that has failed by itself (`RankExited`)."""

    def continued(self, now_ns: int) -> None:
        """Exclude a stop of the whole node, which has just ended."""

    def ending(self, turn: Any) -> None:
        """End with the cycle, before the first signal to its ranks."""

    def blamed(self, cause: Any, turn: Any) -> None:
        """Take the cause of the cycle's end, for which the leader blames this node."""

    def tick(self, turn: Any, *, is_stopping: bool) -> None:
        """Do what is due. ``is_stopping``: the launcher was asked to stop."""
