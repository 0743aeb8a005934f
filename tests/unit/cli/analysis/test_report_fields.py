"""Logs in which a field is of another type than it should be: every output still comes, and the record is counted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.analysis.analysis import Analysis, analyze
from megatron_ft.cli.logs.read import EventLogFile, parse_log
from megatron_ft.cli.logs.runs import split_runs
from megatron_ft.cli.render import html_figures, png
from megatron_ft.cli.render.html_page import write_page
from megatron_ft.cli.render.report_tables import print_analysis, print_run
from megatron_ft.cli.render.trace import write_trace
from megatron_ft.cli.report import summary_document
from megatron_ft.core.facts.all_kinds import RECORDS
from tests.support.arrived import line
from tests.support.generated_logs import Fault, GeneratedJob, write_job

NAN, HUGE, SURROGATE = float("nan"), 10**30, "\udc80"
VALUES: tuple[Any, ...] = (None, [], {}, "x", 1.5, NAN, HUGE, SURROGATE)
JOB = GeneratedJob(
    ranks=2,
    steps=5,
    checkpoint_every=3,
    faults=(Fault(cycle=0, rank=1, iteration=4), Fault(cycle=1, rank=0, iteration=4, kind="signal")),
)
INJECTED = {"ev": "fault_injected", "type": "rank_hung", "rank": 1, "cycle": 0, "iteration": 4}
_DRAWN_OF = 10
_CHECKED = {kind: set(of.__struct_fields__) for kind, of in RECORDS.kinds.items()}

Records = dict[str, list[dict[str, Any]]]
Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    directory = tmp_path_factory.mktemp("logs")
    write_job(directory, JOB)
    found = {path.name: list(map(json.loads, path.read_text().splitlines())) for path in directory.glob("*.jsonl")}
    for of in found.values():
        of.append({**INJECTED, "t": of[-1]["t"]})
        for record in of:
            if record["ev"] == "timeouts":
                record["heartbeat"] = 30.0
    return found


def places(record: dict[str, Any]) -> Iterator[Place]:
    """Of each field of a record, and of what is in it."""
    for name, value in record.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, key) for key in value)
        elif isinstance(value, list) and value:
            yield (name, 0)
            yield from ((name, 0, key) for key in (value[0] if isinstance(value[0], dict) else ()))


def one_of_each(of: list[dict[str, Any]]) -> list[int]:
    """Of each kind of record the one that says most."""
    best: dict[str, int] = {}
    for index, record in enumerate(of):
        least = best.setdefault(record["ev"], index)
        if len(json.dumps(record)) > len(json.dumps(of[least])):
            best[record["ev"]] = index
    return sorted(best.values())


def with_value(record: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(record))
    inside: Any = changed
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    return changed


def log_of(name: str, of: list[dict[str, Any]]) -> EventLogFile | None:
    return parse_log(name, map(line, of))


def write_all(analysis: Analysis, directory: Path, drawn: set[str]) -> None:
    """Every output, of what wasn't written yet."""
    if repr(analysis) in drawn:
        return
    drawn.add(repr(analysis))
    out = io.StringIO()
    print_run(analysis.summary, out)
    print_analysis(analysis, out)
    out.getvalue().encode()
    json.dumps(summary_document(analysis), allow_nan=False).encode()
    write_trace(analysis.timeline, str(directory / "trace"))
    if len(drawn) % _DRAWN_OF == 1:  # they show what the timeline knows, which the trace has shown to be sound
        write_page(analysis, [str(directory)], str(directory / "page"))
        png.draw_png(analysis, str(directory / "png"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of few columns: what they are drawn of is what counts here."""
    for name in ("_LEAST_DETAIL_COLUMNS", "_MOST_DETAIL_COLUMNS", "_SCREEN_COLUMNS"):
        monkeypatch.setattr(html_figures, name, 20)
    monkeypatch.setattr(png, "_COLUMNS", 20)
    monkeypatch.setattr(png, "_DPI", 20)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_report_of_a_record_with_a_field_of_any_type_is_written(
    records: Records, tmp_path: Path, part: int, small: None
) -> None:
    drawn: set[str] = set()
    read: set[str] = set()
    tried = 0
    (name,) = records
    for index in one_of_each(records[name])[part::3]:
        for place in places(records[name][index]):
            for value in VALUES:
                changed = list(records[name])
                changed[index] = with_value(changed[index], place, value)
                log = log_of(name, changed)
                if repr(log) not in read:  # most changes leave the same: a log without that record
                    read.add(repr(log))
                    for run in split_runs([] if log is None else [log]):
                        write_all(analyze(run), tmp_path, drawn)
                if value == HUGE or value is NAN:  # wrong in any place
                    is_known = place[0] in ("t", "ev", *_CHECKED[records[name][index]["ev"]])
                    assert not is_known or log is None or log.passed_over == 1, (changed[index], place)
                tried += 1
    print(f"{tried} changes, {len(read)} different logs, {len(drawn)} different reports")
    assert tried > 100
    assert len(drawn) > 10


def test_good_records_are_not_counted(records: Records) -> None:
    for name, of in records.items():
        log = log_of(name, of)
        assert log is not None
        assert log.passed_over == 0
