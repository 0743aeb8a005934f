"""A part of the leader: one capability, which the rest of the leader doesn't know by name. Pure.

A part hears its own kinds of messages from launchers, and returns answers. It reads the running cycle, and may report
how one of its nodes stands, hold the conclusion on the cycle, or end it. Times are seconds of the leader's own clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.nodes import Node
from megatron_ft.link.base.codec import PartMessage, PartState


@dataclass(frozen=True, slots=True)
class ToNodes:
    """A message for nodes of the cycle: for all of them, unless ``places`` says for which."""

    message: PartMessage
    places: Collection[int] | None = None


Answers = Iterable[ToNodes | str]
"""Messages for nodes, and lines for the user about the whole job."""


class LeaderPart:
    """One leader's. ``HEARS`` and ``SAYS``: unions of the messages from and to launchers.

    After ``QUIET`` ones nothing is due at once: thousands of nodes may send them.
    """

    HEARS: ClassVar[Any]
    SAYS: ClassVar[Any]
    QUIET: ClassVar[tuple[type[PartMessage], ...]] = ()

    @property
    def due_s(self) -> float | None:
        """Latest time of the next ``tick``."""
        return None

    def begin(self, cycle: JobCycle) -> Answers:
        """Serve this cycle from now on. It was decided here, or by another leader, whose launchers are to come."""
        raise NotImplementedError

    def joined(self, node: Node, place: int) -> Answers:
        """Take over what a launcher that has connected reports of the cycle, and repeat what it may have missed."""
        return ()

    def hear(self, node: Node, place: int, message: Any, now_s: float) -> Answers:
        """Take a message of a node of the cycle."""
        return ()

    def verdict(self, now_s: float) -> float | None:
        """End the running cycle if this part knows of a reason; return until when it may know one, if it may."""
        return None

    def attachment(self, chosen: Sequence[Node], spares: Sequence[Node]) -> Sequence[PartState]:
        """Return what the next decision says to this part of its nodes; ``chosen``: these, by place."""
        return ()

    def tick(self, now_s: float) -> Answers:
        """Return what is due."""
        return ()
