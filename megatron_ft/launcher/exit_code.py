"""How the job has ended for a launcher: its exit code, and what it may say of that for the whole job."""

from __future__ import annotations

import os

from megatron_ft.core.agent.edge import Exit, Over
from megatron_ft.core.exit_codes import TRY_AGAIN_CODE
from megatron_ft.core.job.lives import Ending
from megatron_ft.core.job.messages import REFUSED, Verdict
from megatron_ft.launcher.base import bounded_file_calls
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.result_file import End

__all__ = ["launcher_failed", "of"]

_FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


def of(over: Over, line: CommandLine) -> End:
    """The launcher's exit code, and what it may say of the job, by how its part in the job is over."""
    verdict = over.verdict
    match over.how:
        case Exit.SUCCEEDED:
            return _succeeded(verdict, line)
        case Exit.STOPPED:
            return _stopped(line, over.text, over.code)
        case Exit.FAILED:
            is_stalled = verdict is not None and verdict.no_progress
            cause = "" if verdict is None else "; ".join(filter(None, [verdict.cause(None).text, verdict.reason]))
            return End(over.code, Ending.NO_PROGRESS if is_stalled else Ending.FAILED, cause)
        case Exit.ABANDONED if line.max_nodes == 1:
            return End(over.code, Ending.LOST, over.text)
        case Exit.EXCLUDED if over.code:
            return End(over.code, Ending.FAILED, over.text or "a node was excluded, and too few nodes are left")
        case Exit.LEFT if over.code not in (0, REFUSED):
            return End(over.code, Ending.LOST if over.code == TRY_AGAIN_CODE else Ending.FAILED, over.text)
    return End(over.code)


def _succeeded(verdict: Verdict | None, line: CommandLine) -> End:
    """All ranks have ended with 0. Whether that is the end of the training, a flag file says, if there is to be one."""
    flag = os.environ.get(_FINISHED_FLAG, "")
    if flag and not bounded_file_calls.call(lambda: os.path.exists(flag), True):
        return _stopped(line, f"all ranks exited with 0, but {flag} doesn't exist: the training isn't finished")
    if not flag and verdict is not None and verdict.stopped:
        return _stopped(line, "asked to stop, all ranks ended with 0")
    return End(0, Ending.FINISHED)


def launcher_failed(line: CommandLine, text: str) -> End:
    """The launcher itself has failed, not its ranks. Other nodes go on without it."""
    return End(1, Ending.FAILED if line.max_nodes == 1 else None, text)


def _stopped(line: CommandLine, text: str, code: int = 0) -> End:
    chosen = line.stopped_code
    return End(code if chosen is None else chosen, Ending.STOPPED, text)
