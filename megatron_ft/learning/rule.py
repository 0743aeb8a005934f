"""The rule for learned timeouts, and what of it is in force on a board. Pure; seconds."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Arm
from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.link.base import layout
from megatron_ft.link.base.intervals import CHECKPOINTING, SECTIONS, SETUP, STEP, HangKind
from megatron_ft.link.base.layout import ArmedTimeout, BoardSnapshot, timeout_word

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


def facts_of(*, loaded: bool, setup_open: bool, enough_steps: bool, saved: bool, async_saves: bool) -> int:
    """Return the FACT_ bits of a run that learns by its own collectives."""
    facts = layout.FACT_LOADED * loaded | FACT_SETUP_OPEN * setup_open | layout.FACT_ENOUGH_STEPS * enough_steps
    return facts | FACT_SAVED * saved | layout.FACT_ASYNC_SAVES * async_saves


def reasons_against(facts: int, *, is_closing: bool) -> dict[str, str]:
    """Return why a timeout isn't learned now, for each usual section, and at the end of a run for OUT_OF_SECTION.

    Empty: it is learned. As in Megatron's modules, "setup" counts if it held the load of a checkpoint from storage:
    others are shorter than some will be. How much of an asynchronous save falls into "checkpointing" differs between
    runs. The longest time out of section may be yet to come until the run ends.
    """
    why = dict.fromkeys(SECTIONS, "")
    if not facts & layout.FACT_LOADED:
        why[SETUP] = "the timeout of 'setup' is learned in a run that loads a persistent checkpoint"
    elif facts & FACT_SETUP_OPEN:
        why[SETUP] = "the timeout of 'setup' isn't learned before its end"
    if not facts & layout.FACT_ENOUGH_STEPS:
        why[STEP] = "the timeout of 'step' isn't learned before more training iterations were seen"
    if not facts & FACT_SAVED:
        why[CHECKPOINTING] = "the timeout of 'checkpointing' is learned after a save"
    elif facts & layout.FACT_ASYNC_SAVES:
        why[CHECKPOINTING] = "the timeout of 'checkpointing' isn't learned with asynchronous saves"
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
    are_learned = bool(board.heartbeat_flags & layout.FLAG_ARE_LEARNED)
    initial = _armed(arm, HangKind.INITIAL_HEARTBEAT.value, board.own_initial_heartbeat_timeout_ns, are_learned)
    beat = _armed(arm, HangKind.HEARTBEAT.value, board.own_heartbeat_timeout_ns, are_learned)
    return board._replace(
        sections=tuple(
            each._replace(armed=_armed(arm, each.name, each.own_timeout_ns, each.is_calculated))
            for each in board.sections
        ),
        armed_out_of_section=_armed(
            arm, OUT_OF_SECTION, board.own_out_of_section_timeout_ns, board.is_out_of_section_calculated
        ),
        armed_initial_heartbeat_ns=initial.timeout_ns if initial is not None and are_learned else None,
        armed_heartbeat_ns=beat.timeout_ns if beat is not None and are_learned else None,
    )


def _armed(arm: Arm, name: str, own_ns: int | None, is_calculated: bool) -> ArmedTimeout | None:
    timeout_s = arm.timeouts.get(name)
    if timeout_s is None:
        return None
    timeout_ns = timeout_word(timeout_s)
    if is_calculated:
        return None if own_ns is None or timeout_ns <= own_ns else ArmedTimeout(timeout_ns)
    return ArmedTimeout(timeout_ns, arm.enforced) if own_ns is None or arm.enforced else None


def enforced_armed_s(words: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """Return the armed timeouts that are enforced, in seconds; ``names``: of all sections, then out of section."""
    ats = [*(layout.slot(at) + layout.S_ARMED for at in range(len(names) - 1)), layout.W_OUT_OF_SECTION_ARMED]
    armed = zip(names, ((words[at], words[at + 1]) for at in ats), strict=True)
    return {name: ns / 1e9 for name, (ns, flags) in armed if ns and flags == layout.ARMED_ENFORCED}
