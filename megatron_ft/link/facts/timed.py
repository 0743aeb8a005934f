"""A record of an event log in wall time, so that records of several nodes can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=object, covariant=True)


@dataclass(frozen=True, slots=True)
class Timed(Generic[R]):
    """A record in wall time.

    Args:
        at_ns: when it was written, ns since the epoch.
        offset_ns: offset of such times from the record's own moments.
        record: None for an unknown kind, or an unusable record.
    """

    at_ns: int
    offset_ns: int
    host: str
    record: R

    def wall_ns(self, moment_ns: int) -> int:
        """Convert one of its own moments to wall time."""
        return moment_ns + self.offset_ns
