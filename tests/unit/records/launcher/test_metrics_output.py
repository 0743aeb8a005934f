"""Metrics of a launcher: served, and written to a file; and what a disk that is full costs."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from megatron_ft.config.launcher_options import LauncherOptions
from megatron_ft.link.facts.launcher import Cause, CycleEnded, CycleStarted
from megatron_ft.link.facts.minutes import RankMinute, SectionMinute
from megatron_ft.link.facts.monitor import Minute
from megatron_ft.link.facts.timed import Timed
from megatron_ft.records.launcher.metrics_output import MetricsOutput
from megatron_ft.records.rules.accounting import account
from megatron_ft.records.rules.metrics import GaugeValues, NodeActivity

CRASH = CycleEnded(cycle=0, outcome="failed", cause=Cause(text="rank 0 exited"), action="restart")


class Node:
    """A node that trains."""

    def readings(self, *, is_last: bool = False) -> GaugeValues:
        told = account([Timed(1, 0, "", CRASH)] if is_last else [])
        return GaugeValues(accounting=told, iteration=7, nodes={"a": NodeActivity.TRAINING})


def minute_of(lengths_s: list[float]) -> Minute:
    """Steps of one rank in a minute, and a time in none."""
    step, outside = SectionMinute(), SectionMinute()
    for length_s in lengths_s:
        step.add(0.0, length_s, depth=0, is_first=False)
        outside.add(0.0, 9.0, depth=0, is_first=False)
    row = RankMinute(rank=0, from_s=0.0, to_s=60.0, sections={"step": step, "out_of_section": outside})
    return Minute(cycle=0, at_ns=0, ranks=(row,))


def test_file_holds_the_metrics_at_the_end_and_says_that_the_node_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    output = MetricsOutput(LauncherOptions(metrics_textfile=str(path)), node="a", say=pytest.fail)
    output.hear(CycleStarted(cycle=0, group_rank=0))
    output.look(Node())
    output.close()
    shown = path.read_text().splitlines()
    assert 'megatron_ft_restarts_total{cause="membership"} 1.0' in shown
    assert 'megatron_ft_node_state{node="a",state="ended"} 1.0' in shown
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]


def test_served_metrics_are_those_of_the_last_look() -> None:
    said: list[str] = []
    output = MetricsOutput(LauncherOptions(metrics_port="127.0.0.1:0"), node="a", say=said.append)
    output.hear(CycleStarted(cycle=0, group_rank=0))
    output.hear(minute_of([0.3, 0.3]))
    output.look(Node())
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
