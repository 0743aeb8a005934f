"""End of this life of the job: exit code and ``LOG_DIR/result.json``.

``result.json`` has state and outcome of the lives of the job, for scripts and later lives, and is written atomically.
The launcher at place 0 writes it when a cycle begins and at the end; if that one is lost, one of the next places does.
The launcher doesn't wait for it: the event log's thread reads and writes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from megatron_ft.exit_codes import MISTAKE_CODE, TRY_AGAIN_CODE
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.faults import Fault, back_again, bad_nodes, fault_of
from megatron_ft.job.rules.lives import LIVES_FILE, Ending, Life, Lives, NodeEnd
from megatron_ft.job.rules.messages import Verdict
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.processes.health_command import FINISHED_FLAG
from megatron_ft.launcher.rules.events import Exit, LauncherExit
from megatron_ft.link.facts.reported_hang import MOST_HANGS
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.files.own_files import ForeignFileError, read_own, replace_own
from megatron_ft.link.log import LAUNCHER, WARNING
from megatron_ft.records.event_log import EventLog
from megatron_ft.records.rules.accounting import Accounting

_READ_S = 2.0
_TELLERS = 8
"""Number of lowest places that write the end, if no lower one has."""


@dataclass(frozen=True)
class LauncherEnd:
    """End of the job for this launcher. ``ending`` is None if it isn't this launcher's to tell."""

    code: int
    ending: Ending | None = None
    cause: str = ""
    attribution: str = ""
    ranks_exited_with_0: bool = False
    """All ranks of the last cycle did, on all nodes."""
    error: Exception | None = field(default=None, compare=False)
    """Raised to a caller of the launcher's ``main``, which has no exit code to read."""

    @property
    def reason(self) -> str:
        """Why the container of this launcher ended; empty if that isn't this launcher's to tell."""
        if self.ending is None:
            return ""
        return self.ending.value.replace("_", " ") + (f": {self.cause}" if self.cause else "")

    @property
    def is_resumable(self) -> bool:
        """True if the job was stopped, or lost too many nodes: another start goes on where this one was."""
        is_lost = self.ending is Ending.LOST or self.code == TRY_AGAIN_CODE
        return (self.ending is Ending.STOPPED or is_lost) and not self.ranks_exited_with_0


def end_of(over: LauncherExit, line: CommandLine) -> LauncherEnd:
    """Return the launcher's exit code, and what it may tell of the job, by the end of its part."""
    verdict, flag = over.verdict, os.environ.get(FINISHED_FLAG, "")
    match over.how:
        case Exit.SUCCEEDED:
            end = LauncherEnd(0, Ending.FINISHED)
            if flag and not bounded_call(lambda: os.path.exists(flag), True):
                text = f"all ranks exited with 0, but {flag} doesn't exist: the training isn't finished"
                end = _stopped(line, text)
            elif not flag and verdict is not None and verdict.stopped:
                end = _stopped(line, "a launcher received a signal to stop, all ranks exited with 0")
            return replace(end, ranks_exited_with_0=True)
        case Exit.STOPPED:
            return _stopped(line, over.text, over.code)
        case Exit.FAILED if verdict is not None:
            cause, decision = verdict.cause_for(None), verdict.decision
            ending = Ending.NO_PROGRESS if decision.no_progress else Ending.FAILED
            text = "; ".join(filter(None, [cause.text, decision.reason]))
            return LauncherEnd(over.code, ending, text, attribution=str(cause.attribution or ""))
        case Exit.FAILED:
            return LauncherEnd(over.code, Ending.FAILED)
        case Exit.ABANDONED if line.max_nodes == 1:
            return LauncherEnd(over.code, Ending.LOST, over.text)
        case Exit.EXCLUDED if over.code:
            return LauncherEnd(over.code, Ending.FAILED, over.text or "a node was excluded, and too few nodes are left")
        case Exit.LEFT if over.code not in (0, MISTAKE_CODE):
            return LauncherEnd(over.code, Ending.LOST if over.code == TRY_AGAIN_CODE else Ending.FAILED, over.text)
    return LauncherEnd(over.code)


def _stopped(line: CommandLine, text: str, code: int = 0) -> LauncherEnd:
    chosen = line.where.stopped_code
    return LauncherEnd(code if chosen is None else chosen, Ending.STOPPED, text)


def read_lives(log_dir: str | None) -> Lives:
    """Return the job's lives so far; none if they can't be read soon."""
    if log_dir is None:
        return Lives()
    return bounded_call(lambda: _read(os.path.join(log_dir, LIVES_FILE)), Lives(), bound_s=_READ_S)


class ResultFile:
    """This life's record, as far as this launcher knows.

    Args:
        log_dir: None: nothing is written.
        is_first: this launcher tells the job's end as long as no cycle has begun.
    """

    def __init__(
        self,
        log: EventLog,
        log_dir: str | None,
        *,
        job: str,
        command: Sequence[str],
        is_first: bool,
        before: JobProgress,
    ) -> None:
        self._log = log
        self._path = None if log_dir is None else os.path.join(log_dir, LIVES_FILE)
        self._life = _reached(Life(job=job, command=tuple(command), began=utc(time.time())), before)
        self._name = socket.gethostname()
        self.place = 0 if is_first else None
        """Place of this node in its last cycle; None if it wasn't in any, or was left out."""
        self._began: Decision | None = None
        self.ending: Ending | None = None
        """End of the job, as far as this launcher may tell."""
        self.is_decided = False
        """True if the job has ended for all its nodes, by their decision."""

    def begun(self, held: Assignment) -> None:
        """Record the start of a cycle in which this node has a place."""
        decision = held.decision
        life = structs.replace(
            self._life,
            nodes=decision.world,
            cycles=decision.cycle + 1,
            restarts=decision.restarts,
            faults=self._faults(decision),
        )
        self._life, self.place, self._began = _reached(life, decision.advance), held.place, decision
        if held.place == 0:
            life = self._life
            self._change(
                lambda lives: (lives.begun(life) if decision.cycle == 0 else lives.updated(life)).back(decision.back)
            )

    def concluded(self, verdict: Verdict) -> None:
        """Record the end of a cycle. A coordinator that takes over may repeat the verdict."""
        if self._began is None or verdict.cycle != self._began.cycle:
            return
        fault = fault_of(verdict)
        if fault is not None and all(known.cycle != fault.cycle for known in self._life.faults):
            self._life = structs.replace(self._life, faults=(*self._life.faults, fault))

    def ended(self, end: LauncherEnd, *, decided: Decision | None, accounting: Accounting) -> None:
        """Record the end of the job. ``decided``: last decision this launcher knows."""
        place, ending = self.place, end.ending
        self.ending, self.is_decided = ending, decided is not None and decided.kind is DecisionKind.END
        if ending is None or place is None:
            return
        if self._has_only_left:
            left = NodeEnd(node=self._name, exit_code=end.code, cause=end.cause)
            self._change(lambda lives: lives.left(self._life.job, left))
            return
        if place >= _TELLERS:
            return
        life = self._life
        if decided is not None and self.is_decided:
            life = _reached(structs.replace(life, faults=self._faults(decided)), decided.advance)
        cycles, goodput = accounting.cycles, accounting.goodput
        iteration = max([life.iteration, *(each.last_iteration for each in cycles if each.last_iteration is not None)])
        first = cycles[-1].first_iteration if cycles and cycles[-1].restored is None else None
        life = structs.replace(
            life,
            outcome=ending,
            exit_code=end.code,
            cause=end.cause,
            attribution=end.attribution,
            decided=self.is_decided,
            ended=utc(time.time()),
            iteration=iteration,
            # the decision describes failed cycles, and the last one may have ended otherwise
            trained=life.trained or end.ranks_exited_with_0 or iteration >= 0,
            resumed=life.resumed if first is None else max(life.resumed, first),
            restores=sum(each.restored is not None for each in cycles),
            redone=0 if goodput is None else goodput.redone,
            goodput=None if goodput is None else round(goodput.share, 4),
            hangs=accounting.hangs[-MOST_HANGS:],
        )
        self._change(lambda lives: lives.updated(life, is_first=place == 0))

    def _faults(self, decision: Decision) -> tuple[Fault, ...]:
        """Return the faults, updated by the next decision: progress of the cycle before it, and nodes that are back."""
        before, faults = self._began, back_again(self._life.faults, decision.back)
        if before is None or decision.advance.last <= before.advance.last:
            return faults
        return tuple(structs.replace(each, advanced=True) if each.cycle == before.cycle else each for each in faults)

    def bad_nodes(self) -> dict[str, str]:
        """Return bad nodes by name with reasons, if this launcher speaks for the job.

        Empty for a launcher that has left without knowing the job's end: the others may know better.
        """
        return {} if self.place != 0 or self._has_only_left else bad_nodes(self._life.faults)

    @property
    def _has_only_left(self) -> bool:
        is_of_several = self._began is not None and self._began.world > 1
        return self.ending is Ending.LOST and not self.is_decided and is_of_several

    def _change(self, change: Callable[[Lives], Lives]) -> None:
        if self._path is not None:
            self._log.do(functools.partial(rewrite, self._path, change))


def _reached(life: Life, advance: JobProgress) -> Life:
    return structs.replace(
        life, iteration=advance.last, resumed=advance.first, stalled=advance.stalled, trained=advance.trained
    )


def rewrite(path: str, change: Callable[[Lives], Lives]) -> None:
    lives = _read(path)
    changed = change(lives)
    if changed is lives:
        return
    try:
        replace_own(path, changed.to_text().encode())
    except ForeignFileError:
        pass  # it was said where it was read
    except OSError as error:
        LAUNCHER.put(WARNING, f"megatron_ft: {path} can't be written: {error.strerror}")


@functools.cache
def _say_once(line: str) -> None:
    """Each cycle reads the file anew, and what is in its place stays there."""
    LAUNCHER.put(WARNING, line)


def _read(path: str) -> Lives:
    try:
        return Lives.parse(read_own(path))
    except FileNotFoundError:
        return Lives()
    except ForeignFileError as error:
        _say_once(f"megatron_ft: {path} {error.strerror}: it is neither read nor written")
        return Lives()
    except (OSError, ValueError) as error:
        aside = f"{path}.unreadable"
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        LAUNCHER.put(WARNING, f"megatron_ft: {path} can't be read ({error}); it is {aside} now")
        return Lives()


def utc(at_s: float) -> str:
    """Format seconds since the epoch as in `Life`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
