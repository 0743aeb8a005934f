"""Metrics of a launcher: served, and written to a file; and what a disk that is full costs."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path

from megatron_ft.config.launcher_options import LauncherOptions
from megatron_ft.link.facts.all_kinds import Timed
from megatron_ft.link.facts.launcher import Cause, CycleEnded, CycleStarted
from megatron_ft.link.facts.minutes import RankMinute, SectionMinute
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.link.reactor import Reactor
from megatron_ft.records.launcher.telemetry import Telemetry
from megatron_ft.records.rules.metrics import GaugeValues, NodeActivity
from tests.support.accounts import account

CRASH = CycleEnded(cycle=0, outcome="failed", cause=Cause(text="rank 0 exited"), action="restart")


def readings(*, is_last: bool = False) -> GaugeValues:
    """Return those of a node that trains."""
    told = account([Timed(1, 0, "", CRASH)] if is_last else [])
    return GaugeValues(accounting=told, iteration=7, nodes={"a": NodeActivity.TRAINING})


def telemetry(said: list[str], **options: str) -> Telemetry:
    with closing(Reactor()) as reactor:
        return Telemetry(LauncherOptions(**options), run_id="job", node="a", reactor=reactor, say=said.append)


def minute_of(lengths_s: list[float]) -> Minute:
    """Steps of one rank in a minute, and a time in none."""
    step, outside = SectionMinute(), SectionMinute()
    for length_s in lengths_s:
        step.add(0.0, length_s, depth=0, is_first=False)
        outside.add(0.0, 9.0, depth=0, is_first=False)
    row = RankMinute(rank=0, from_s=0.0, to_s=60.0, sections={"step": step, "out_of_section": outside})
    return Minute(cycle=0, at_ns=0, ranks=(row,))


def test_file_holds_the_metrics_at_the_end_and_says_that_the_node_has_ended(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "job.prom"
    output = telemetry(said, metrics_textfile=str(path))
    output.hear(CycleStarted(cycle=0, group_rank=0), is_spokesman=True)
    output.look(readings)
    output.close()
    shown = path.read_text().splitlines()
    assert 'megatron_ft_restarts_total{cause="membership"} 1.0' in shown
    assert 'megatron_ft_node_state{node="a",state="ended"} 1.0' in shown
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]
    assert said == []


def test_served_metrics_are_those_of_the_last_look() -> None:
    said: list[str] = []
    output = telemetry(said, metrics_port="127.0.0.1:0")
    output.hear(CycleStarted(cycle=0, group_rank=0), is_spokesman=True)
    output.hear(minute_of([0.3, 0.3]), is_spokesman=True)
    output.look(readings)
    port = int(said[0].removeprefix("metrics: http://127.0.0.1:").removesuffix("/metrics"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    shown = connection.getresponse().read().decode().splitlines()
    assert "megatron_ft_iteration 7.0" in shown
    assert 'megatron_ft_section_seconds_bucket{le="0.2",section="step"} 0.0' in shown
    assert 'megatron_ft_section_seconds_bucket{le="0.5",section="step"} 2.0' in shown
    assert 'megatron_ft_section_seconds_bucket{le="+Inf",section="step"} 2.0' in shown
    assert 'megatron_ft_section_seconds_sum{section="step"} 0.6' in shown
    assert not any("section_seconds" in line and "out_of_section" in line for line in shown)
    connection.close()
    output.close()
