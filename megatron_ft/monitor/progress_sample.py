"""One observation of a rank that may run on: nothing is sent to it but the question that its own thread answers."""

from __future__ import annotations

import threading
import time

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.diagnosis.collectives import Collectives
from megatron_ft.core.diagnosis.movement import ProgressSample, is_file_wait
from megatron_ft.ipc.linux.proc import main_thread_ns, transferred_bytes, waiting_channels
from megatron_ft.ipc.linux.processes import read_stat
from megatron_ft.ipc.monitor_process import AttachedRank
from megatron_ft.monitor.evidence import Looks

__all__ = ["take_sample"]

_ASK_S = 0.7
_READ_S = 0.2
_SAMPLES = 10


def take_sample(attached: AttachedRank, snapshot: BoardSnapshot | None) -> ProgressSample:
    """What it does now; bounded in time."""
    at_ns = time.monotonic_ns()
    stat = read_stat(attached.pid)
    looks = Looks(attached, snapshot, at_ns + round(_ASK_S * 1e9), freeze=False)
    answer = looks.ask("" if stat is None else stat.state, [], samples=_SAMPLES)
    ran_ns, starved_ns = main_thread_ns(attached.pid)
    told = answer.collectives
    entered, completed = (told.enqueued, told.completed) if isinstance(told, Collectives) else (None, None)
    stacks = [each for each in answer.places if each]
    return ProgressSample(
        at_ns=at_ns,
        iterations=0 if snapshot is None else snapshot.iterations_seen,
        events=None if snapshot is None else snapshot.ring_head,
        entered=entered,
        completed=completed,
        stacks=frozenset(stacks),
        frame=stacks[-1][0].partition(" @")[0] if stacks else "",
        cpu_ns=ran_ns + starved_ns,
        starved_ns=starved_ns,
        transferred=_transferred(attached.pid),
        file_waits={tid: each for tid, each in waiting_channels(attached.pid).items() if is_file_wait(each)},
    )


def _transferred(pid: int) -> dict[int, int] | None:
    """None if that takes too long: a process of the rank's may stand still in the middle of an exec."""
    found: list[dict[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(transferred_bytes(pid)), daemon=True)
    thread.start()
    thread.join(_READ_S)
    return found[0] if found and found[0] else None
