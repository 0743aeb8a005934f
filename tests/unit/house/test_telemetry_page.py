"""docs/telemetry.md holds the names of all metrics, spans, attributes and events, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.link.facts.launcher import CauseKind
from megatron_ft.records.rules import notifications, spans
from megatron_ft.records.rules.accounting import TimeClass
from megatron_ft.records.rules.metrics import METRICS, NodeActivity
from tests import ROOT

PAGE = (ROOT / "docs" / "telemetry.md").read_text()
PACKAGE = ROOT / "megatron_ft"


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the tables below that heading, up to the next one."""
    part = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]


def test_table_of_metrics_is_that_of_the_code() -> None:
    told = [row for row in rows_of("Metrics") if row[0].startswith("`megatron_ft_")]
    known = [
        [
            f"`{each.name}{{{','.join(each.labels)}}}`" if each.labels else f"`{each.name}`",
            each.kind.value,
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


def test_table_of_spans_is_that_of_the_code() -> None:
    told = {row[0].strip("`"): row[2] for row in rows_of("Traces") if row[0].startswith("`nvrx.ft.")}
    words = {None: "not set", True: "true", False: "false"}
    assert told == {name: words[is_overhead] for name, is_overhead in spans.IS_OVERHEAD.items()}


def test_attributes_of_spans_are_listed() -> None:
    source = Path(spans.__file__).read_text()
    used = set(re.findall(r'"((?:nvrx|megatron_ft)\.[a-z_.]+[a-z])"', source)) - spans.IS_OVERHEAD.keys()
    used |= {f"megatron_ft.cause.{each}" for each in ("kind", "text", "rank", "host", "section", "iteration")}
    told = {name for row in rows_of("Traces") if len(row) == 3 for name in re.findall(r"`([a-z_.]+)`", row[0])}
    assert {name for name in told if name.startswith(("nvrx.", "megatron_ft.")) and ".ft." not in name} == used


def test_resource_attributes_are_listed() -> None:
    source = (PACKAGE / "records" / "launcher" / "traces.py").read_text()
    used = set(re.findall(r'"((?:slurm|nemo|nvrx|host|service)\.[a-z_.]+)"', source))
    assert {name for name in used if f"`{name}`" not in PAGE} == set()
    assert len(used) > 10


def test_events_are_those_of_the_code() -> None:
    told = [row[0].strip("`") for row in rows_of("Notifications") if row[0] != "`event`" and not row[0].startswith("-")]
    assert sorted(told) == sorted(notifications.EVENTS)
