"""How the job has ended for a launcher: its exit code, and what it may say of that for the whole job."""

from __future__ import annotations

import os
import signal

from megatron_ft.core.job.lives import Ending
from megatron_ft.core.job.messages import REFUSED
from megatron_ft.launcher.base import lines, logs
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.coordination.meeting_place import TRY_AGAIN_CODE, Kind, MeetingPlace
from megatron_ft.launcher.job_errors import JobLeftError
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.result_file import End

__all__ = ["excluded", "failed", "launcher_failed", "left", "speaks_for_the_job", "stopped", "succeeded"]

_FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


def speaks_for_the_job(place: MeetingPlace) -> bool:
    """Whether this launcher ever can; with torch's own rendezvous only the first node's does."""
    return place.kind is not Kind.TORCH or place.rank == 0


def succeeded(node: Node, coordination: Coordination) -> End:
    """All ranks have ended with 0. Whether that is the end of the training, a flag file says, if there is to be one."""
    flag, verdict = os.environ.get(_FINISHED_FLAG, ""), coordination.verdict
    if flag and not logs.call(lambda: os.path.exists(flag), True):
        return _stopped(node, f"all ranks ended with 0, and there is no {flag}: there is more to train")
    if not flag and verdict is not None and verdict.stopped:
        return _stopped(node, "asked to stop, all ranks ended with 0")
    return End(0, Ending.FINISHED)


def stopped(node: Node, number: int) -> End:
    """The launcher was asked to stop by that signal."""
    name = signal.Signals(number).name
    well = node.ranks_ended_well
    text = lines.stopped(name, [] if well else ["not all ranks ended with 0"])
    return _stopped(node, text, 128 + number if number == signal.SIGINT else 0 if well else 1)


def failed(node: Node, coordination: Coordination | None) -> End:
    """It has failed for good."""
    verdict = None if coordination is None else coordination.verdict
    is_stalled = verdict is not None and verdict.no_progress
    cause = "" if verdict is None else "; ".join(filter(None, [verdict.cause(None).text, verdict.reason]))
    return End(node.failure_code, Ending.NO_PROGRESS if is_stalled else Ending.FAILED, cause)


def excluded(node: Node, coordination: Coordination | None, *, job_ends: bool) -> End:
    """This node leaves the others. Its exit code is 0 if they go on: a scheduler that ends the whole job when one
    node's task fails would undo what was asked for.
    """
    if not job_ends:
        return End(0)
    text = "" if coordination is None or coordination.left is None else coordination.left.text
    return End(1, Ending.FAILED, text or "a node was left out, and the others are too few")


def left(error: JobLeftError) -> End:
    """The job has ended, or goes on, without this launcher."""
    if error.code in (0, REFUSED):
        return End(error.code)
    return End(error.code, Ending.LOST if error.code == TRY_AGAIN_CODE else Ending.FAILED, str(error))


def launcher_failed(node: Node, text: str) -> End:
    """By no fault of its ranks. Others go on without it."""
    return End(1, Ending.FAILED if node.line.max_nodes == 1 else None, text)


def _stopped(node: Node, text: str, code: int = 0) -> End:
    chosen = node.line.stopped_code
    return End(code if chosen is None else chosen, Ending.STOPPED, text)
