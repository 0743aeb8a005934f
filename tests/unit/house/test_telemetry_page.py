"""docs/telemetry.md holds the names of all metrics and events, and no others."""

from __future__ import annotations

import re

from megatron_ft.link.facts.launcher import CauseKind
from megatron_ft.records.rules import notifications
from megatron_ft.records.rules.accounting import TimeClass
from megatron_ft.records.rules.metrics import METRICS, NodeActivity
from tests import ROOT

PAGE = (ROOT / "docs" / "telemetry.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the tables below that heading, up to the next one."""
    part = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]


def test_table_of_metrics_is_that_of_the_code() -> None:
    told = [row for row in rows_of("Metrics") if row[0].startswith("`megatron_ft_")]
    known = [
        [
            f"`{each.name}{{{','.join(each.labels)}}}`" if each.labels else f"`{each.name}`",
            each.kind,
            "job" if each.of_job else "node",
            each.help,
        ]
        for each in METRICS
    ]
    assert told == known


def test_values_of_labels_are_named() -> None:
    classes = re.findall(r"`(\w+)`", PAGE.split("- `class` is one", 1)[1].split(". A launcher", 1)[0])
    assert classes == [each.value for each in TimeClass]
    listed = re.findall(r"`(\w+)`", PAGE.split("- `cause` is ", 1)[1].split("\n- ", 1)[0])
    known = {*(each.value for each in CauseKind), *(each.value for each in NodeActivity)}
    assert {*listed} - {"phase", "state"} == known


def test_events_are_those_of_the_code() -> None:
    told = [row[0].strip("`") for row in rows_of("Notifications") if row[0] != "`event`" and not row[0].startswith("-")]
    assert sorted(told) == sorted(notifications.EVENTS)
