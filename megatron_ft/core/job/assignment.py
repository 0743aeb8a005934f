"""The cycle in which a launcher's node has a place. Pure."""

from __future__ import annotations

from megatron_ft.core.job.decisions import Assignment


class NodeAssignments:
    """One launcher's, shared by all that ask: the agent, and the rendezvous that hands its place to torch."""

    def __init__(self) -> None:
        self.begun: Assignment | None = None
        """The last cycle that this node has a place in."""
        self.taken: Assignment | None = None
        """The last one whose ranks it was to run."""

    def begin(self, held: Assignment) -> None:
        self.begun = held

    def take(self) -> Assignment:
        assert self.begun is not None
        self.taken = self.begun
        return self.begun

    @property
    def has_begun(self) -> bool:
        """Another cycle than the one taken has begun. If the one taken still runs, its end was never received."""
        return self.begun is not self.taken

    @property
    def place(self) -> int | None:
        """Place of this node in the cycle that was taken."""
        return None if self.taken is None else self.taken.place
