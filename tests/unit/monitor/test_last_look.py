"""A rank that is suspected, and a launcher that doesn't answer."""

from __future__ import annotations

from unittest import mock

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import ConfirmHang
from megatron_ft.monitor import last_look
from tests.support.agents import hung

S = 1_000_000_000
OVERDUE = hung(section="step", since_ns=1, elapsed_s=10.0, timeout_s=10.0, learned=True)


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [100 * S]
    monkeypatch.setattr(last_look.time, "monotonic_ns", lambda: now[0])
    return now


def asked(verdict: RankHung) -> tuple[last_look.LastLook, mock.Mock]:
    watched = mock.Mock()
    mine = last_look.LastLook(mock.Mock(), has_launcher=True)
    assert mine.ask_launcher_first(watched, verdict)
    return mine, watched


def test_rank_past_its_learned_timeout_is_ended_if_the_launcher_is_silent(now_ns: list[int]) -> None:
    mine, watched = asked(OVERDUE)
    now_ns[0] += round((EVIDENCE_S + 0.9) * 1e9)
    assert not mine.give_up_waiting(watched)
    now_ns[0] += round(0.2e9)
    assert mine.give_up_waiting(watched)
    assert not mine.ask_launcher_first(watched, OVERDUE)
    watched.put_off.assert_not_called()


REPORT_ONLY = replace(OVERDUE, enforced=False)


def test_report_only_suspicion_is_put_off_if_the_launcher_is_silent(now_ns: list[int]) -> None:
    mine, watched = asked(REPORT_ONLY)
    now_ns[0] += round((EVIDENCE_S + 1.1) * 1e9)
    assert mine.give_up_waiting(watched)
    watched.put_off.assert_called_once_with(REPORT_ONLY)
    watched.detector.extend_timeout.assert_not_called()
    assert mine.due_ns is None
    assert mine.ask_launcher_first(watched, REPORT_ONLY), "it is asked anew"


def test_report_only_suspicion_is_put_off_without_a_launcher() -> None:
    watched = mock.Mock()
    mine = last_look.LastLook(mock.Mock(), has_launcher=False)
    assert mine.ask_launcher_first(watched, REPORT_ONLY)
    watched.put_off.assert_called_once_with(REPORT_ONLY)
    assert not mine.ask_launcher_first(watched, OVERDUE)


def test_a_confirmed_hang_is_reported_once_the_board_shows_it_again(now_ns: list[int]) -> None:
    mine, watched = asked(REPORT_ONLY)
    assert mine.obey(watched, ConfirmHang(0))
    assert not mine.ask_launcher_first(watched, REPORT_ONLY)


@pytest.mark.parametrize(
    "other",
    [replace(OVERDUE, section="outer"), replace(OVERDUE, since_ns=2), OVERDUE],
    ids=["other section", "other interval", "enforced since"],
)
def test_the_confirmation_of_a_report_counts_for_no_other_interval(now_ns: list[int], other: RankHung) -> None:
    mine, watched = asked(REPORT_ONLY)
    assert mine.obey(watched, ConfirmHang(0))
    assert mine.ask_launcher_first(watched, other), "the launcher is asked about it"
    assert mine.ask_launcher_first(watched, other)


def test_rearming_does_not_ask_the_launcher_twice(now_ns: list[int]) -> None:
    reports = mock.Mock()
    mine = last_look.LastLook(reports, has_launcher=True)
    mine.ask_launcher_first(mock.Mock(), OVERDUE)
    mine.ask_launcher_first(mock.Mock(), replace(OVERDUE, timeout_s=9.0))
    assert reports.tell.call_count == 1
