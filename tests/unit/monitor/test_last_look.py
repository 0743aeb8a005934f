"""A rank that is suspected, and a launcher that doesn't answer."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.messages.monitor_messages import ConfirmHang
from megatron_ft.monitor import last_look
from megatron_ft.monitor.rules.hang_detector import Overdue

S = 1_000_000_000
OVERDUE = Overdue(HangKind.SECTION, "step", 1, 10 * S, 10 * S, None, ("step",), is_learned=True)


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [100 * S]
    monkeypatch.setattr(last_look.time, "monotonic_ns", lambda: now[0])
    return now


def asked(verdict: Overdue) -> tuple[last_look.LastLook, mock.Mock]:
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


REPORT_ONLY = OVERDUE._replace(enforced=False)


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
    [OVERDUE._replace(section="outer"), OVERDUE._replace(since_ns=2), OVERDUE],
    ids=["other section", "other interval", "enforced since"],
)
def test_the_confirmation_of_a_report_counts_for_no_other_interval(now_ns: list[int], other: Overdue) -> None:
    mine, watched = asked(REPORT_ONLY)
    assert mine.obey(watched, ConfirmHang(0))
    assert mine.ask_launcher_first(watched, other), "the launcher is asked about it"
    assert mine.ask_launcher_first(watched, other)


def test_rearming_does_not_ask_the_launcher_twice(now_ns: list[int]) -> None:
    reports = mock.Mock()
    mine = last_look.LastLook(reports, has_launcher=True)
    mine.ask_launcher_first(mock.Mock(), OVERDUE)
    mine.ask_launcher_first(mock.Mock(), OVERDUE._replace(timeout_ns=9 * S))
    assert reports.tell.call_count == 1
