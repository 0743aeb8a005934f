"""The rule for learned timeouts, and what of it is in force on a board. Pure; seconds."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Arm
from megatron_ft.link.base import layout
from megatron_ft.link.base.intervals import CHECKPOINTING, SECTIONS, SETUP, STEP, HangKind
from megatron_ft.link.base.layout import ArmedTimeout, BoardSnapshot, timeout_word
from megatron_ft.link.facts.minutes import OUT_OF_SECTION

REPORT_FLOOR_S = 5.0
"""Least timeout that reports: with five times a step of 20 ms, a page fault would be reported."""
ABOVE_LONGEST = 1.25
MOST_EXTENDED = 4.0
"""Longest interval while ranks make progress, as a multiple of its learned timeout."""
_LEAST_S = 1e-3


def calculate(longest_s: float, previous_s: float | None, factor: float) -> float:
    """Return the calculated timeout; ``previous_s``: the one calculated before, None if there is none."""
    fresh = factor * max(longest_s, _LEAST_S)
    if previous_s is not None:
        fresh = (previous_s + fresh) / 2
    return max(fresh, ABOVE_LONGEST * longest_s)


_CONDITIONS = (
    (CHECKPOINTING, layout.FACT_ASYNC_SAVES, False, "isn't learned with asynchronous saves"),
    (CHECKPOINTING, FACT_SAVED, True, "is learned after a save"),
    (STEP, layout.FACT_ENOUGH_STEPS, True, "isn't learned before more training iterations were seen"),
    (SETUP, FACT_SETUP_OPEN, False, "isn't learned before its end"),
    (SETUP, layout.FACT_LOADED, True, "is learned in a run that loads a persistent checkpoint"),
)
"""Section, fact, whether it must be true or false, and what is said otherwise; the last one that isn't met is said.

As in Megatron's modules, "setup" counts if it held the load of a checkpoint from storage: others are shorter than some
will be. How much of an asynchronous save falls into "checkpointing" differs between runs.
"""


def reasons_against(facts: int, *, is_closing: bool) -> dict[str, str]:
    """Return why a timeout isn't learned now, for each usual section, and at the end of a run for OUT_OF_SECTION.

    Empty: it is learned. The longest time out of section may be yet to come until the run ends.
    """
    why = dict.fromkeys(SECTIONS, "")
    for section, fact, wanted, reason in _CONDITIONS:
        if bool(facts & fact) is not wanted:
            why[section] = f"the timeout of '{section}' {reason}"
    if is_closing:
        has_all = facts & FACT_SAVED and not why[SETUP] and not why[STEP]
        all_of = "the out-of-section timeout isn't learned: that takes a load, enough iterations and a save"
        why[OUT_OF_SECTION] = "" if has_all else all_of
    return why


# -- what is in force on a board --------------------------------------------------------------------------------


def with_armed(arm: Arm | None, board: BoardSnapshot) -> BoardSnapshot:
    """Return the board with the armed timeouts that it should have, whatever its armed words say.

    A timeout that the rank's client has calculated is only replaced by a longer one. One that is only reported never
    replaces a timeout of the rank's own.
    """
    arm = Arm(board.cycle) if arm is None or board.watch_only else arm

    def armed(name: str, own_ns: int | None, is_calculated: bool) -> ArmedTimeout | None:
        if (timeout_s := arm.timeouts.get(name)) is None:
            return None
        timeout_ns = timeout_word(timeout_s)
        if is_calculated:
            return None if own_ns is None or timeout_ns <= own_ns else ArmedTimeout(timeout_ns)
        return ArmedTimeout(timeout_ns, arm.enforced) if own_ns is None or arm.enforced else None

    def armed_heartbeat(kind: HangKind, own_ns: int | None) -> int | None:
        found = armed(kind.value, own_ns, True) if board.heartbeat_flags & layout.FLAG_ARE_LEARNED else None
        return found and found.timeout_ns

    return board._replace(
        sections=tuple(
            each._replace(armed=armed(each.name, each.own_timeout_ns, each.is_calculated)) for each in board.sections
        ),
        armed_out_of_section=armed(
            OUT_OF_SECTION, board.own_out_of_section_timeout_ns, board.is_out_of_section_calculated
        ),
        armed_initial_heartbeat_ns=armed_heartbeat(HangKind.INITIAL_HEARTBEAT, board.own_initial_heartbeat_timeout_ns),
        armed_heartbeat_ns=armed_heartbeat(HangKind.HEARTBEAT, board.own_heartbeat_timeout_ns),
    )


def enforced_armed_s(words: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """Return the armed timeouts that are enforced, in seconds; ``names``: of all sections, then out of section."""
    ats = [*(layout.slot(at) + layout.S_ARMED for at in range(len(names) - 1)), layout.W_OUT_OF_SECTION_ARMED]
    armed = zip(names, ((words[at], words[at + 1]) for at in ats), strict=True)
    return {name: ns / 1e9 for name, (ns, flags) in armed if ns and flags == layout.ARMED_ENFORCED}
