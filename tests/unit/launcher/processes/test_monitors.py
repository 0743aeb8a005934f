"""Nothing of a monitor that passes the check can hurt the launcher."""

from __future__ import annotations

import json
import os
import random

from megatron_ft.diagnosis.cycle_cause import find_cause
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.diagnosis.root_cause import find
from megatron_ft.errors import ProtocolError
from megatron_ft.launcher.processes.monitors import event_of
from megatron_ft.launcher.rules import events
from megatron_ft.link.base.codec import encode
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages import monitor_messages
from tests.fuzz.hostile import Hostile, examples
from tests.support.arrived import arrived


def test_hostile_report_that_passes_the_check_can_be_processed() -> None:
    rng = random.Random(int(os.environ.get("FT_TEST_SEED", "6")))
    hostile = Hostile(rng, examples(monitor_messages.REPORTS.kinds.values()))
    passed = dict.fromkeys(monitor_messages.REPORTS.kinds, 0)
    for _ in range(20_000):
        message = json.loads(hostile.framed()[4:])
        try:
            report = monitor_messages.REPORTS.parse(arrived(message))
        except ProtocolError:
            continue
        passed[message["type"]] += 1
        match event_of(0, report):
            case events.MonitorReport(report=RankHung() as verdict):
                assert find_cause([], [verdict]) is not None
            case events.MonitorReport(report=monitor_messages.Observation(note=note)):
                encode(note)
                find([note, RankSnapshot(rank=note.rank + 1)], elapsed_s=1.0)
    assert min(passed.values()) > 100, passed
