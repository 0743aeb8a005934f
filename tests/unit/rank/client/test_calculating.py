"""The collective calculation of timeouts over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.rank.client import calculating

S = 10**9
NEVER = -1


class Ranks:
    """This rank, and what the others have seen: their maxima of ended intervals, and of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others: Sequence[float] | None = None
        monkeypatch.setattr(calculating, "max_over_ranks", self._maxima)

    def _maxima(self, values: Sequence[float]) -> list[float]:
        others = values if self.others is None else self.others
        return [max(pair) for pair in zip(values, others, strict=True)]

    def calculated(
        self,
        ended: dict[str, int],
        others: Sequence[float] | None = None,
        going_on: dict[str, int] | None = None,
        previous: dict[str, float | None] | None = None,
        *,
        leaves_out_open: bool = False,
    ) -> dict[str, float] | list[str]:
        """The timeouts, or the names of those that aren't ready."""
        self.others = others
        found, missing = calculating.calculate_over_ranks(
            ended, going_on or {}, previous or {}, 5.0, leaves_out_open=leaves_out_open
        )
        return missing or found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_configured_value_is_replaced_and_a_calculated_one_averaged(ranks: Ranks) -> None:
    old = SectionTimeouts({"step": 100.0, "ckpt": None})
    assert ranks.calculated({"step": 2 * S}, previous=old.calculated) == {"step": 10.0}
    new = old.with_calculated({"step": 10.0})
    assert (new.section, new.calculated_sections) == ({"step": 10.0, "ckpt": None}, {"step"})
    assert ranks.calculated({"step": 4 * S}, previous=new.calculated) == {"step": (10.0 + 20.0) / 2}


def test_a_section_that_nobody_has_closed_is_not_ready_however_old_it_is(ranks: Ranks) -> None:
    ended = {"epoch": NEVER, "step": S // 20}
    assert ranks.calculated(ended, going_on={"epoch": 100 * S}) == ["epoch"]
    assert ranks.calculated(ended, [-1.0, 1.0] * 2) == ["epoch"]


def test_section_that_is_open_and_was_never_closed_can_be_left_out_the_same_on_all_ranks(ranks: Ranks) -> None:
    ended = {"setup": NEVER, "step": S // 2}
    assert ranks.calculated(ended, going_on={"setup": 9 * S}, leaves_out_open=True) == {"step": 2.5}
    assert ranks.calculated(ended, [-1.0, 0.5, 9.0, 0.5], leaves_out_open=True) == {"step": 2.5}
    assert ranks.calculated(ended, leaves_out_open=True) == ["setup"]


def test_the_age_of_an_open_section_counts_beside_a_closed_one_of_any_rank(ranks: Ranks) -> None:
    for ended in (2 * S, NEVER):
        assert ranks.calculated({"epoch": ended}, [3.0, 3.0], going_on={"epoch": 4 * S}) == {"epoch": 20.0}


def test_heartbeat_timeouts_are_calculated_then_averaged(ranks: Ranks) -> None:
    assert ranks.calculated({"initial": 3 * S, "subsequent": S}) == {"initial": 15.0, "subsequent": 5.0}
    found = ranks.calculated({"initial": 5 * S, "subsequent": 3 * S}, previous={"initial": 15.0, "subsequent": 5.0})
    assert found == {"initial": 20.0, "subsequent": 10.0}
    assert ranks.calculated({"initial": 3 * S, "subsequent": NEVER}) == ["subsequent"]
