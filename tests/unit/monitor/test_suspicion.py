"""A rank that is suspected, and a launcher that doesn't answer."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_ft.core.board.hang_detector import Overdue
from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.diagnosis.rank_snapshot import EVIDENCE_S
from megatron_ft.monitor import suspicion

S = 1_000_000_000
OVERDUE = Overdue(HangKind.SECTION, "step", 1, 10 * S, 10 * S, None, ("step",), is_learned=True)


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [100 * S]
    monkeypatch.setattr(suspicion.time, "monotonic_ns", lambda: now[0])
    return now


def asked(verdict: Overdue) -> tuple[suspicion.Suspicion, mock.Mock]:
    watched = mock.Mock()
    mine = suspicion.Suspicion(mock.Mock(), has_launcher=True)
    assert mine.ask_launcher_first(watched, verdict)
    return mine, watched


def test_one_whose_learned_timeout_is_over_is_terminated(now_ns: list[int]) -> None:
    mine, watched = asked(OVERDUE)
    now_ns[0] += round((EVIDENCE_S + 0.9) * 1e9)
    assert not mine.act(watched)
    now_ns[0] += round(0.2e9)
    assert mine.act(watched)
    assert not mine.ask_launcher_first(watched, OVERDUE)
    watched.extend_timeout.assert_not_called()


def test_one_that_is_suspected_early_has_its_learned_timeout(now_ns: list[int]) -> None:
    early = OVERDUE._replace(learned_ns=60 * S)
    mine, watched = asked(early)
    now_ns[0] += round((EVIDENCE_S + 1.1) * 1e9)
    assert not mine.act(watched)
    watched.extend_timeout.assert_called_once_with(early, 60.0)
    assert mine.due_ns is None
