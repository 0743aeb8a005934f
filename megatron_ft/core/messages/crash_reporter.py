"""What a monitor asks of a rank's crash reporter, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.core.codec import Count, fields, unpack
from megatron_ft.core.diagnosis.collectives import Collectives, NoCollectives
from megatron_ft.core.diagnosis.stacks import Frame

__all__ = ["Answer", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """What are your collectives, and where is your main thread? ``samples``: how often to look where it is, too."""

    id: Count
    samples: Count = 0


@dataclass(frozen=True, slots=True)
class _Head:
    id: Count
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To the question of this ``id``.

    Args:
        stack: the calls of the main thread, the innermost first.
        places: where the main thread was seen, each place once: such calls, each with the instruction it was at.
    """

    id: int
    collectives: Collectives | NoCollectives
    stack: tuple[Frame, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()

    def packed(self) -> dict[str, Any]:
        """For JSON: all in one object."""
        return {**fields(_Head(self.id, self.stack, self.places)), **fields(self.collectives)}

    @staticmethod
    def parse(message: Any) -> Answer:
        """The other way.

        Raises:
            ProtocolError: it is none.
        """
        head = unpack(_Head, message)
        told = unpack(NoCollectives, message) if "error" in message else unpack(Collectives, message)
        return Answer(id=head.id, collectives=told, stack=head.stack, places=head.places)
