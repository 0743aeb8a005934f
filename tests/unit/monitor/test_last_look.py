"""A rank that is suspected, and a launcher that answers or doesn't."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import ExtendTimeout
from megatron_ft.link.messages.rank_messages import Answer
from megatron_ft.monitor import last_look
from tests.support.agents import hung

S = 1_000_000_000
OVERDUE = hung(section="step", since_ns=1, elapsed_s=10.0, timeout_s=10.0, learned=True)
REPORT_ONLY = replace(OVERDUE, enforced=False)
WAITS_NS = 13 * S
"""Length of the interval until which the launcher is waited for."""


def asked(verdict: RankHung) -> tuple[last_look.LastLook, mock.Mock]:
    watched, reports = mock.Mock(), mock.Mock()
    mine = last_look.LastLook(reports, has_launcher=True)
    assert mine.ask_launcher_first(watched, verdict)
    watched.reports = reports
    watched.detector.extend_timeout.assert_called_once_with(verdict, WAITS_NS)
    return mine, watched


@pytest.mark.parametrize("changes", [{"elapsed_s": 13.1}, {"timeout_s": 9.0}], ids=["silent launcher", "armed anew"])
def test_rank_past_its_learned_timeout_is_asked_about_once_and_then_ended(changes: dict[str, float]) -> None:
    mine, watched = asked(OVERDUE)
    assert not mine.ask_launcher_first(watched, replace(OVERDUE, **changes))
    assert watched.reports.tell.call_count == 1
    without_launcher = last_look.LastLook(mock.Mock(), has_launcher=False)
    assert not without_launcher.ask_launcher_first(mock.Mock(), OVERDUE)


def test_report_only_suspicion_is_asked_about_anew_if_the_launcher_is_silent() -> None:
    mine, watched = asked(REPORT_ONLY)
    later = replace(REPORT_ONLY, elapsed_s=13.5)
    assert mine.ask_launcher_first(watched, later)
    watched.detector.extend_timeout.assert_called_with(later, 16.5 * S)
    assert watched.reports.tell.call_count == 2


def test_extended_interval_is_asked_about_again_once_it_is_overdue() -> None:
    mine, watched = asked(OVERDUE)
    mine.obey(watched, ExtendTimeout(0, 12.5))
    watched.detector.extend_timeout.assert_called_with(OVERDUE, 12.5 * S)
    mine.obey(watched, ExtendTimeout(0))
    assert mine.ask_launcher_first(watched, OVERDUE), "no question was open"


@pytest.mark.parametrize(
    "other",
    [replace(OVERDUE, section="outer"), replace(OVERDUE, since_ns=2), OVERDUE],
    ids=["other section", "other interval", "enforced since"],
)
def test_confirmation_of_a_report_counts_for_its_interval_and_for_no_other(other: RankHung) -> None:
    mine, watched = asked(REPORT_ONLY)
    mine.obey(watched, ExtendTimeout(0))
    watched.detector.extend_timeout.assert_called_with(REPORT_ONLY, 0)
    assert not mine.ask_launcher_first(watched, REPORT_ONLY)
    assert mine.ask_launcher_first(watched, other), "the launcher is asked about it"
    assert not mine.ask_launcher_first(watched, other)


@pytest.mark.parametrize("why", ["", "the rank didn't answer"])
def test_collectives_of_a_rank_that_does_not_answer_are_unknown(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Answer(id=1, collectives=Collectives(enqueued={} if why else {"gloo/0": 9}, error=why))
    monkeypatch.setattr(last_look, "Probe", lambda *_args, **_options: mock.Mock(ask=lambda *_args, **_options: told))
    sample = last_look.take_sample(mock.Mock(pid=os.getpid()), None)
    assert (sample.entered, sample.completed) == ((None, None) if why else ({"gloo/0": 9}, {}))
