"""The records of the event logs, each a frozen dataclass; ``docs/event-log.md`` is made from them.

Users and their scripts build on them. Within one ``SCHEMA`` a record or a field may be added, nothing else changes;
what a reader doesn't know it passes over. A field without a default is one that no reader can do without.
"""

from __future__ import annotations

from megatron_ft.core.messages.codec import Vocabulary
from megatron_ft.core.records import launcher, monitor, rank, shared

__all__ = ["RECORDS", "SCHEMA", "Record", "launcher", "monitor", "rank", "shared"]

SCHEMA = 1

Record = shared.Record | launcher.Record | monitor.Record | rank.Record
RECORDS: Vocabulary[Record] = Vocabulary(Record, tag="ev")
