"""The lives of a job: one record from each start by a scheduler to its end, for scripts and for the next life. Pure.

``result.json`` in the log directory holds them. What a job has reached, and which nodes have failed it, is carried from
life to life through it. Times are texts, UTC.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.job.rules.faults import Fault, back_again, bad_nodes
from megatron_ft.job.rules.restart_policy import JobProgress
from megatron_ft.link.base.codec import Fact, Finite, Int, decode, to_builtins
from megatron_ft.link.facts.reported_hang import ReportedHang

LIVES_FILE = "result.json"
"""Name in the log directory."""
VERSION = 1
_MOST_LIVES = 200
_MOST_FAULTS = 100


class Ending(enum.Enum):
    """End of a life."""

    RUNNING = "running"
    """The life hasn't ended; or no launcher was left to write how."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """On request, with more to train."""
    FAILED = "failed"
    NO_PROGRESS = "no_progress"
    MISTAKE = "mistake"
    """User error: no rank was started."""
    LOST = "lost"
    """The job could go on from its last checkpoint, but not from where it was."""


class NodeEnd(Fact, frozen=True, kw_only=True):
    """End of one launcher that left a job whose end it never learned: the other nodes may have gone on."""

    node: str
    exit_code: Int
    cause: str


class Life(Fact, frozen=True, kw_only=True):
    """From a start of the job's launchers to their end; docs/results.md describes the fields.

    Args:
        job: what tells the job from others: ``--rdzv-id`` and what the scheduler says.
        command: what the ranks run; what was reached is carried on only from lives that ran the same.
        restores: on the node that wrote this.
    """

    life: Int = 0
    job: str
    command: tuple[str, ...] = ()
    outcome: Ending = Ending.RUNNING
    exit_code: Int | None = None
    cause: str = ""
    attribution: str = ""
    began: str = ""
    ended: str = ""
    nodes: Int = 0
    cycles: Int = 0
    restarts: Int = 0
    iteration: Int = -1
    resumed: Int = -1
    stalled: Int = 0
    restores: Int = 0
    redone: Int = 0
    goodput: Finite | None = None
    hangs: tuple[ReportedHang, ...] = ()
    trained: bool = False
    faults: tuple[Fault, ...] = ()
    decided: bool = False
    left: tuple[NodeEnd, ...] = ()


class Lives(Fact, frozen=True, kw_only=True):
    """All lives of a job, oldest first."""

    version: Int = VERSION
    lives: tuple[Life, ...] = ()

    @staticmethod
    def parse(text: str | bytes) -> Lives:
        """Parse the content of the file.

        Raises:
            ValueError: it isn't that.
        """
        try:
            found = decode(Lives, text)
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        if found.version != VERSION:
            raise ValueError(f"no result of version {VERSION}")
        return found

    def to_text(self) -> str:
        """Return the content of the file, with every field, and bad nodes on top."""
        document = {"version": VERSION, "bad_nodes": self.bad_nodes(), **to_builtins(self)}
        return json.dumps(document, indent=1) + "\n"

    def bad_nodes(self) -> dict[str, str]:
        """Return bad nodes by name, with reasons; see `faults.bad_nodes`."""
        return bad_nodes(fault for life in self.lives for fault in life.faults)

    def back(self, names: Collection[str]) -> Lives:
        return Lives(lives=tuple(replace(life, faults=back_again(life.faults, names)) for life in self.lives))

    def advance(self, command: Sequence[str]) -> JobProgress:
        """Return how far the job had got with this command, if it was to go on from there."""
        last = self.lives[-1] if self.lives else None
        is_over = last is None or last.outcome in (Ending.FINISHED, Ending.NO_PROGRESS)
        if last is None or is_over or last.command != tuple(command):
            return JobProgress()
        return JobProgress(last.resumed, last.iteration, last.stalled, last.trained)

    def _last(self, job: str) -> Life | None:
        """Return the last life, if it is one of this job."""
        return self.lives[-1] if self.lives and self.lives[-1].job == job else None

    def has_finished(self, job: str, command: Sequence[str] = (), *, since: str = "") -> bool:
        """Return True if the job has finished, at ``since`` or later, and with ``command`` if one is given."""
        last = self._last(job)
        is_it = last is not None and last.outcome is Ending.FINISHED and last.ended >= since
        return is_it and (not command or self.lives[-1].command == tuple(command))

    def begun(self, life: Life) -> Lives:
        """Return the lives with another one begun. One before that has recorded no end was killed."""
        lives, number = self.lives, self.lives[-1].life + 1 if self.lives else 1
        if lives and lives[-1].outcome is Ending.RUNNING:
            unknown = "no end was recorded: its processes were killed, or their host was lost"
            cause = lives[-1].left[-1].cause if lives[-1].left else unknown
            lives = (*lives[:-1], replace(lives[-1], outcome=Ending.LOST, cause=cause))
        return Lives(lives=(*lives, replace(life, life=number))[-_MOST_LIVES:])

    def updated(self, life: Life, *, is_first: bool = True) -> Lives:
        """Return the lives with news of the last one: a cycle of it has begun, or it has ended.

        A decided end is final, and replaces one that isn't. Of launchers that don't know whether it was decided, only
        the first one replaces what another has written.
        """
        last = self._last(life.job)
        if last is None or (last.decided and life.outcome is Ending.RUNNING):
            return self.begun(life)
        if last.decided or (last.outcome is not Ending.RUNNING and not (life.decided or is_first)):
            return self
        by_cycle = {(fault.cycle, fault.node): fault for fault in (*last.faults, *life.faults)}
        faults = tuple(by_cycle.values())[-_MOST_FAULTS:]
        more = replace(life, life=last.life, began=last.began, command=last.command, faults=faults, left=last.left)
        return Lives(lives=(*self.lives[:-1], more))

    def left(self, job: str, end: NodeEnd) -> Lives:
        """Return the lives with the end of one launcher, which says nothing of the job.

        Its machine is in order, even if the other nodes have lost it.
        """
        last = self._last(job)
        if last is None:
            return self
        others = [each for each in last.left if each.node != end.node]
        life = replace(last, left=(*others, end)[-_MOST_FAULTS:], faults=back_again(last.faults, [end.node]))
        return Lives(lives=(*self.lives[:-1], life))
