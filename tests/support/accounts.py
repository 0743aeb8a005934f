"""Accounting of records at hand."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.records.rules.accounting import Accounting, Ledger


def account(records: Sequence[Timed[Record]], *, begin_ns: int | None = None, end_ns: int | None = None) -> Accounting:
    """Return the accounting of a life; without its ends, from the first record to the last."""
    told = sorted(records, key=lambda event: event.at_ns)
    first_ns, last_ns = (told[0].at_ns, told[-1].at_ns) if told else (0, 0)
    ledger = Ledger(first_ns if begin_ns is None else begin_ns)
    for event in told:
        ledger.take(event)
    return ledger.accounting(last_ns if end_ns is None else end_ns)
