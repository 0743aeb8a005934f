"""Exit codes 16 and 17 of Megatron's rerun state machine, and what follows from each. Pure.

Megatron re-runs an iteration whose result it rejects (NaN, Inf, a spiky loss), and ends all ranks by these codes:

=====  ================================  ==========================================================================
code   state at the exit                 what has happened
=====  ================================  ==========================================================================
16     WILL_RERUN_FROM_CHECKPOINT        The GPU gave the same result again. A checkpoint is saved: another GPU is to
                                         re-run the iteration.
16     RERUNNING_AGAIN_FROM_CHECKPOINT   The same GPU was given the re-run: another one is still needed.
17     RERUNNING_IN_PLACE                The GPU gave another result: a transient error. Resume from a checkpoint.
17     RERUNNING_FROM_CHECKPOINT         Another GPU has re-run it: the first GPU is bad, or the result was correct. The
                                         checkpoint holds the re-run: each resume from it ends in the same way.
=====  ================================  ==========================================================================

Another program may exit with 16 or 17 for reasons of its own. So the codes count only where the rank itself has
written down the state of that machine at its exit, and code and state agree.
"""

from __future__ import annotations

import enum

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Fact, Int, decode, encode

MODULE = "megatron.core.rerun_state_machine"
RERUN_MARK = "Megatron's rerun state machine at the exit:"
"""Begins a line in the memory that a rank's crash reporter writes, before the state as JSON."""
_LONGEST = 4096


class Rerun(enum.Enum):
    """Meaning of a rank's exit by the state machine for the job; the values appear in messages."""

    ELSEWHERE = "elsewhere"
    """The iteration is to be re-run from the checkpoint, by another GPU."""
    AGAIN = "again"
    """Another re-run is wanted, because Megatron took the new GPU for the same one: by host name and device number."""
    TRANSIENT = "transient"
    """A re-run on the same GPU gave another result."""
    CONCLUDED = "concluded"
    """Another GPU has re-run the iteration from the checkpoint."""


_MEANINGS = {
    (16, "WILL_RERUN_FROM_CHECKPOINT"): Rerun.ELSEWHERE,
    (16, "RERUNNING_AGAIN_FROM_CHECKPOINT"): Rerun.AGAIN,
    (17, "RERUNNING_IN_PLACE"): Rerun.TRANSIENT,
    (17, "RERUNNING_FROM_CHECKPOINT"): Rerun.CONCLUDED,
}
WANTS_ANOTHER_GPU = (Rerun.ELSEWHERE, Rerun.AGAIN)
EXIT_STATES = frozenset(state for _, state in _MEANINGS)


class RerunState(Fact, frozen=True, kw_only=True):
    """The state machine of one rank, as the rank has written it down.

    Args:
        state: name of Megatron's ``RerunState``.
        own: the rejected result is this rank's; all ranks exit with the same code.
        node, device: where the rejected result was computed, if it was reproduced there.
    """

    state: str
    own: bool = False
    node: str = ""
    device: Int | None = None


def rerun_entry(state: RerunState) -> str:
    """Return what a rank writes to the memory of its crash reporter."""
    return f"\n{RERUN_MARK} {encode(state).decode()}\n"


def rerun_state(text: str) -> RerunState | None:
    """Read the last entry in that memory; None if there is none."""
    at = text.rfind(RERUN_MARK)
    if at < 0:
        return None
    line = text[at + len(RERUN_MARK) :].split("\n", 1)[0]
    try:
        return decode(RerunState, line[:_LONGEST])
    except ProtocolError:
        return None


def rerun_meaning(exitcode: int, state: RerunState | None) -> Rerun | None:
    """Return what an exit means; None if it is none by the state machine."""
    return None if state is None else _MEANINGS.get((exitcode, state.state))


def describe_rerun(who: str, meaning: Rerun, state: RerunState) -> str:
    """Say what a rank, ``who``, has ended for."""
    if meaning is Rerun.ELSEWHERE:
        return f"{who} asks to re-run from the checkpoint on another GPU (Megatron exit code 16)"
    if meaning is Rerun.AGAIN:
        asks = "got the same GPU and asks again to re-run from the checkpoint on another one"
        return f"{who} {asks} (Megatron exit code 16)"
    if meaning is Rerun.TRANSIENT:
        did = "computed" if state.own else "ended because another rank computed"
        return f"{who} {did} a wrong result that the same GPU did not reproduce (Megatron exit code 17)"
    gpu = "a GPU" if state.device is None else f"GPU {state.device}"
    where = f" of {gpu} on {state.node}" if state.own and state.node else ""
    return f"{who} has re-run a rejected result{where} on another GPU (Megatron exit code 17)"
