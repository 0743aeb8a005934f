"""Records of all processes, for readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.facts import launcher, monitor, rank, shared

Record = shared.Record | launcher.Record | monitor.Record | rank.Record
RECORDS: Vocabulary[Record] = Vocabulary(Record)
R = TypeVar("R", bound=object, covariant=True)


@dataclass(frozen=True, slots=True)
class Timed(Generic[R]):
    """A record in wall time, so that records of several nodes can be compared.

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
