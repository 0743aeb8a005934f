"""How the ranks of a cycle end where somebody has to do with it: a signal, a rank that asks for it, a monitor."""

from __future__ import annotations

import signal
import time

from megatron_ft.launcher.base import lines
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes.worker import Worker

__all__ = ["let_monitors_end", "let_requester_end", "stop_as_asked"]

_MONITOR_ENDS_S = 6.0
"""A monitor that may end its rank signals it at once, and kills it after a grace of 5 s."""


def stop_as_asked(node: Node, workers: list[Worker]) -> None:
    """Pass the signal on and wait, as long as the user allows.

    A Python rank gets the signal itself and alone: its data-loader workers would die of it and take the
    last checkpoint with them. Some other command may be a wrapper that passes nothing on, so its whole
    group gets it.
    """
    line = node.line
    alive = [worker for worker in workers if not worker.look()]
    node.tell_asked_to_stop(ranks=len(alive))
    passed_on = 0

    def over() -> bool:
        nonlocal passed_on
        for number in node.signals.received[passed_on:]:
            passed_on += 1
            if (second := node.signals.second_request()) is not None:
                node.say(lines.killing_at_once(second.name))
                return True
            node.ending.ask(workers, number, whole_group=not line.ranks_are_python)
        # a request that came in these lines has woken the loop, which asks again
        return all(worker.exitcode is not None for worker in workers)

    deadline = time.monotonic() + line.term_timeout
    node.reactor.run_until(over, deadline_s=deadline)
    node.ending.kill(workers)
    if not line.ranks_are_python:
        # the wrapper itself may have died of it at once; what it started has the same time
        left_s = max(0.0, deadline - time.monotonic())
        node.ending.clear(workers, leftover_grace_s=left_s, ask=False)


def let_requester_end(node: Node, record: CycleRecord, workers: list[Worker]) -> None:
    """The rank that asked for the end has something to say on its way out: a traceback, a message."""
    request = record.shutdown_request or record.exclude_request
    if request is not None:
        asked = [worker for worker in workers if worker.pid == request.pid] or workers
        node.ending.wait(asked, node.line.stop_timeout)


def let_monitors_end(node: Node, record: CycleRecord) -> None:
    """Ranks that were found hung get the signal that the user chose for that, from their monitors, and no other."""
    hung = [record.workers[local_rank] for local_rank in record.hung]
    node.reactor.run_until(
        lambda: bool(node.signals.received) or all(w.look() or signal.SIGKILL in w.signals_sent for w in hung),
        deadline_s=min([time.monotonic() + _MONITOR_ENDS_S, *(grace.due_s for grace in record.hung.values())]),
    )
