"""Keep the training state in the node's memory, and go on from it after a restart without redoing an iteration.

    from megatron_ft import memory_checkpoint

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 0}
    if memory_checkpoint.restore(state) is not None:
        optimizer.load_state_dict(state["optimizer"])
    for iteration in range(state["iteration"], 1000):
        train_step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration + 1}
        memory_checkpoint.save(iteration + 1, state)

Under `ft_launcher`; without it `save` does nothing and `restore` returns None. Importing this module does nothing. A
state is a dict of tensors, numbers, strings, bytes, None, and dicts, lists and tuples of them. No call is a collective.
"""

from __future__ import annotations

import operator

from megatron_ft.errors import SnapshotError
from megatron_ft.memory.rank import restoring, saving
from megatron_ft.memory.rank.keeper_connection import find_place, is_child, usable_place
from megatron_ft.rank.base import say

__all__ = ["SnapshotError", "restore", "save", "wait"]


def save(iteration: int, state: object, *, every: int = 1) -> None:
    """Keep the state after ``iteration`` completed iterations, if that is a multiple of ``every``.

    The state is copied within the call; all else follows in a thread. If the snapshot before isn't verified yet, this
    one is skipped. The first call waits for memory, for at most 10 s. Call it in one thread, and not in signal
    handlers: a call while another one runs is skipped. A lower iteration than in the call before says that training has
    gone back.

    Raises:
        SnapshotError: the state has something that can't be kept; the message names its path. Once a snapshot was kept
            this is a warning.
        ValueError: ``iteration`` is negative, or ``every`` isn't positive.
    """
    if not isinstance(every, int) or every < 1 or iteration < 0:
        raise ValueError(f"iteration {iteration!r} or every={every!r} is out of range; every is a number of iterations")
    if find_place() is None:
        say.warn("memory checkpoints are off: this job wasn't started with ft_launcher")
    elif (place := usable_place()) is not None:
        saving.saver(place).save(operator.index(iteration), state, every)


def restore(state: object, *, newer_than: int | None = None) -> int | None:
    """Give ``state`` what was saved, if this cycle goes on from memory. Return the iteration, else None.

    Tensors are overwritten in place, missing ones are created on the CPU, and other values are replaced; call
    ``load_state_dict`` with what isn't in place. The digest of each tensor is compared as it is copied.

    Args:
        newer_than: iteration of the checkpoint that the caller has otherwise; an older snapshot isn't restored. The
            same on all ranks: if some restore and others don't, the cycle ends.

    Raises:
        SnapshotError: the state that was chosen for all ranks can't be had; the launcher restarts the cycle. If it
            can't be told, the rank ends here: it must not go on with another state than the others.
    """
    place = find_place()
    if place is None or place.restore is None or is_child():
        return None
    key = place.restore
    if newer_than is not None and key.iteration <= newer_than:
        restoring.begin_without(place, key, newer_than)
        return None
    restoring.restore(place, key, state, newer_than)
    return key.iteration


def wait() -> None:
    """Return when no snapshot of this rank is on its way any more."""
    if saving.running is not None:
        saving.running.wait()
