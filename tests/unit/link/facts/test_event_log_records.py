"""The records of event logs are what the docs say, and what is written is what is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.facts import launcher, monitor, shared
from megatron_ft.link.facts.all_kinds import RECORDS
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankStarted
from megatron_ft.link.facts.minutes import RankMinute
from megatron_ft.records import event_log
from tests.support import event_log_page
from tests.support.arrived import logged


def test_the_page_in_the_docs_is_that_of_the_classes() -> None:
    assert event_log_page.PATH.read_text() == event_log_page.page(), "run python -m tests.support.event_log_page"


SAMPLES: tuple[Any, ...] = (
    shared.LogOpened(wall_ns=1, pid=2, role="monitor", local_rank=0),
    shared.RankHung(rank=1, cycle=2, kind="section", at_ns=9, since_ns=3, elapsed_s=1, timeout_s=0.5, section="step"),
    launcher.CycleStarted(cycle=0, ranks=(RankStarted(rank=3, pid=7), RankStarted(rank=4))),
    launcher.CycleEnded(cycle=3, cause=Cause(rank=1, kind=CauseKind.HANG)),
    launcher.Config(values={"nnodes": [1]}, sources={"nnodes": "default"}, command=("a", "b")),
    monitor.Timeouts(rank=0, cycle=0, sections={"step": 1.5, "other": None}),
    monitor.Minute(cycle=1, at_ns=60, ranks=(RankMinute(0, 0.0, 60.0),)),
)


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_record_written_is_the_record_read(record: Any) -> None:
    written = json.loads(event_log.record_line(5, record))
    assert written.keys() == {"t", "ev", *record.__struct_fields__}
    assert RECORDS.parse(logged(written)) == record
    assert RECORDS.parse(logged({**written, "of_a_newer_version": 1})) == record
    needed = {
        field.name
        for field in msgspec.structs.fields(record)
        if field.required or getattr(record, field.name) != field.default
    }
    assert RECORDS.parse(logged({name: value for name, value in written.items() if name in needed | {"ev"}})) == record
    assert RECORDS.read(logged(written)) == record


def test_a_world_size_that_no_job_has_is_a_damaged_record() -> None:
    started = {"ev": "cycle_started", "cycle": 0, "world_size": 4}
    assert RECORDS.parse(logged(started)) == launcher.CycleStarted(cycle=0, world_size=4)
    with pytest.raises(ProtocolError):  # a list of the ranks whose logs are missing would fill the memory
        RECORDS.parse(logged({**started, "world_size": 40_000_000_000}))
