"""How status looks: the table, in room or without, and the JSON with the keys that are promised."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from megatron_ft.cli.base.terminal import duration
from megatron_ft.cli.status.status import job_object
from megatron_ft.cli.status.status_table import job_frame
from megatron_ft.diagnosis.waits import RankLag
from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.link.base.layout import SectionView
from megatron_ft.link.messages.job_facts import JobFacts, JobPhase, RankRow, RankState
from tests.support.status_facts import NOW, S, job_facts, rank_facts, snapshot


def draw(facts: JobFacts, *, note: str | None = None, width: int = 140) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    console.print(job_frame(facts, note, width=width))
    return file.getvalue()


def job(*ranks: RankRow, **changes: Any) -> Callable[..., JobFacts]:
    """Its ranks, of which the first have the readings that are given then."""

    def facts(*readings: RankReading) -> JobFacts:
        by_local_rank = dict(zip((rank.local_rank for rank in ranks), readings, strict=False))
        return job_facts(*ranks, readings=by_local_rank, **changes)

    return facts


def cells(drawn: str, rank: int) -> list[str]:
    (line,) = [line for line in drawn.splitlines() if line.split()[:1] == [str(rank)]]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_status_shows_the_job_and_a_row_for_each_rank() -> None:
    sections = (SectionView("step", NOW - 7 * S, 3, 10 * S), SectionView("save", NOW - 2 * S, 1, None))
    facts = job(rank_facts(), rank_facts(rank=6, local_rank=2), world_size=16, nodes=2)
    drawn = draw(facts(RankReading(snapshot(sections=sections))))
    assert drawn.splitlines()[:4] == [
        "job demo  ft_launcher 70, up 1 min 45 s",
        "cycle 1 running for 1 min 40 s, 2 of 16 ranks here on 2 nodes, 2 of 3 restarts left",
        "cycle 0 ended: rank 1 hung",
        "logs: /logs",
    ]
    assert cells(drawn, 5) == ["5", "step > save", "2.0 s", "12", "70 % of 10 s, step", "running"]
    assert cells(drawn, 6) == ["6", "-", "-", "-", "-", "not attached yet"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cycle": None, "cycle_started_ns": None, "ranks": ()}, "no rank was started yet, 2 of 3 restarts left"),
        ({"phase": JobPhase.RESTARTING}, "cycle 1 ended, the next one is starting, 1 of 2 ranks here on 1 node, 2 of"),
        ({"phase": JobPhase.ENDING}, "cycle 1 ended, the job is ending"),
        ({"slow_ranks": (RankLag(1, "b", 0.3, 0.1),)}, "rank 1 on b holds the others back: it spends 10% of its time"),
        ({"observe_only": True}, "observe-only: hung ranks are reported, not killed"),
        ({"paused_since_ns": NOW - 30 * S}, "paused for 30 s: hang detection is off until `megatron-ft resume`"),
    ],
)
def test_header_lines_show_phase_and_restarts_left(changes: dict[str, Any], line: str) -> None:
    assert line in draw(job(rank_facts(), **changes)())


@pytest.mark.parametrize(
    ("rank", "reading", "words"),
    [
        ({"exit_code": 0}, RankReading(), "finished"),
        ({"exit_code": -9}, RankReading(), "killed by SIGKILL"),
        ({}, RankReading(process_state=None), "exited"),
        ({}, RankReading(damaged=True), "board damaged"),
        ({}, RankReading(snapshot(closing=True)), "monitoring ended"),
        ({}, RankReading(snapshot(), process_state="T"), "process stopped"),
        ({"state": RankState.HUNG}, RankReading(snapshot()), "hung, being terminated"),
    ],
)
def test_state_of_a_rank_is_shown_in_words(rank: dict[str, Any], reading: RankReading, words: str) -> None:
    assert cells(draw(job(rank_facts(**rank))(reading)), 5)[-1] == words


def test_text_from_outside_is_neither_markup_nor_terminal_control() -> None:
    sections = (SectionView("[b]x[/b]\x1b[2J", NOW - S, 1, 10 * S),)
    facts = job(rank_facts(), run_id="a\nb\x1b[31m", log_dir="/l\x07")
    drawn = draw(facts(RankReading(snapshot(sections=sections))))
    assert "\x1b" not in drawn
    assert "\x07" not in drawn
    assert r"[b]x[/b]\x1b[2J" in drawn
    assert drawn.startswith(r"job a b\x1b[31m  ft_launcher 70")


def test_duration_is_shown_in_its_two_largest_units() -> None:
    expected = {9.99: "9.9 s", 59.9: "59 s", 200: "3 min 20 s", 7500: "2 h 05 min", 273700: "3 d 4 h"}
    assert {seconds: duration(seconds) for seconds in expected} == expected


def test_json_has_the_promised_keys() -> None:
    """They stand in docs/specification.md: scripts rely on them."""
    sections = (SectionView("step", NOW - 4 * S, 3, 10 * S),)
    facts = job_facts(
        rank_facts(), readings={1: RankReading(snapshot(sections=sections))}, pauses=((NOW - 3 * S, None),)
    )
    assert json.loads(json.dumps(job_object(facts))) == {
        "run_id": "demo",
        "launcher_pid": 70,
        "log_dir": "/logs",
        "phase": "running",
        "uptime_s": 105.0,
        "cycle": 1,
        "cycle_s": 100.0,
        "nodes": 1,
        "world_size": 2,
        "max_restarts": 3,
        "restarts_left": 2,
        "observe_only": False,
        "paused_s": 3.0,
        "last_cause": {"cycle": 0, "kind": "hang", "rank": 1, "text": "rank 1 hung"},
        "goodput": None,
        "reported_hangs": [],
        "slow_ranks": [],
        "ranks": [
            {
                "rank": 5,
                "local_rank": 1,
                "pid": 77,
                "state": "paused",
                "exit_code": None,
                "iteration": 12,
                "sections": [{"name": "step", "open_s": 4.0, "timeout_s": 10.0, "enforced": True}],
                "out_of_section_s": None,
                "heartbeat_s": None,
                "timeout": {"kind": "section", "section": "step", "used_s": 1.0, "timeout_s": 10.0, "share": 0.1},
            }
        ],
    }
