"""Armed timeouts of a board: what follows from the launcher's `Arm` and from the rank's own timeouts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.board import layout
from megatron_ft.core.board.intervals import HangKind
from megatron_ft.core.board.layout import FLAG_ARE_LEARNED, ArmedTimeout, BoardSnapshot, timeout_word
from megatron_ft.learning.messages import Arm
from megatron_ft.learning.timeouts import OUT_OF_SECTION


def with_armed(arm: Arm | None, board: BoardSnapshot) -> BoardSnapshot:
    """Return the board with the armed timeouts that it should have, whatever its armed words say.

    A timeout that the rank's client has calculated is only replaced by a longer one. One that is only reported never
    replaces a timeout of the rank's own.
    """
    arm = Arm(board.cycle) if arm is None or board.watch_only else arm
    are_learned = bool(board.heartbeat_flags & FLAG_ARE_LEARNED)
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
