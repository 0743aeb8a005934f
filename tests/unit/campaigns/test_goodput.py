"""The table of the recorded run with a trace of faults."""

from __future__ import annotations

import json

from tests import ROOT
from tests.bench.goodput import RECORDED, table_of


def test_pages_show_the_table_of_the_recorded_run() -> None:
    table = table_of(json.loads(RECORDED.read_text()))
    for page in ("README.md", "docs/goodput.md"):
        assert table in (ROOT / page).read_text(), page
