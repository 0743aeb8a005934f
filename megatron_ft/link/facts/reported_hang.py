"""A hang that was reported and ended no rank, as status, `result.json`, metrics and the report show it."""

from __future__ import annotations

from megatron_ft.link.base.codec import Fact, Finite, Int

MOST_HANGS = 20
"""Newest reported hangs that are shown where room is short."""


class ReportedHang(Fact, frozen=True, kw_only=True):
    """An interval that was reported as a hang, and ended no rank.

    Args:
        rank: rank that keeps the others waiting, as far as that was found; else the one that was overdue.
        section: overdue section, or kind of interval.
        after_s: its beginning, since the start of the first launcher.
        seconds: from its beginning to the next iteration, or to the end of its cycle.
        went_on: the ranks made progress later.
    """

    cycle: Int
    rank: Int | None
    section: str
    iteration: Int | None
    after_s: Finite
    seconds: Finite
    went_on: bool
    text: str

    @property
    def line(self) -> str:
        """The hang in one line."""
        told = f"for {self.seconds:.0f} s, {'it went on' if self.went_on else 'not restarted'}: {self.text}"
        return f"reported hang in '{self.section}' of cycle {self.cycle} {told}"
