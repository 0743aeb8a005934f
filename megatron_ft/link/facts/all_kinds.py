"""Records of all processes, for readers."""

from __future__ import annotations

from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.facts import launcher, monitor, rank, shared

Record = shared.Record | launcher.Record | monitor.Record | rank.Record
RECORDS: Vocabulary[Record] = Vocabulary(Record)
