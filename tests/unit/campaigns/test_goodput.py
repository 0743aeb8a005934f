"""The table of the recorded run with a trace of faults."""

from __future__ import annotations

import json

from tests.bench import fault_traces, goodput
from tests.bench.goodput import markdown, rows


def test_pages_show_the_table_of_the_recorded_run() -> None:
    recorded = json.loads(goodput.RECORDED.read_text())
    table = markdown(recorded)
    for page in ("README.md", "docs/goodput.md"):
        assert table in (fault_traces.FOLDER.parents[2] / page).read_text(), page
    assert next(row.what for row in rows(recorded)) == "effective training time with a trace of faults"
