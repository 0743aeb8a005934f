"""A rank was found hung: have all ranks looked at, in bounded time, and find which of them is the cause.

The monitor that spoke the verdict ends its rank when this is over, or when its own bound is: nobody waits for what
can't be had. In a job of several nodes that restart together, the first node that finds a rank hung lets all others
look at theirs, and decides for all. Where nodes decide for themselves (``min-healthy``), ranks that weren't found hung
may go on living, so nothing is sent to them.
"""

from __future__ import annotations

import dataclasses
import json
import time

from megatron_ft.core.exit_description import (
    Cause,
    CauseKind,
    HangVerdict,
    RankView,
    as_verdict,
    describe_overdue,
    hang_of_nobody,
)
from megatron_ft.core.finding import Finding, find
from megatron_ft.core.last_words import LastWords
from megatron_ft.core.rank_note import LOOK_S, RankNote
from megatron_ft.ipc.wire import Message
from megatron_ft.launcher import crash_evidence
from megatron_ft.launcher.announce import found_by
from megatron_ft.launcher.cycle_record import CycleRecord
from megatron_ft.launcher.monitor_reports import hang_verdict
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.peers import Peers
from megatron_ft.launcher.reactor import Timer

__all__ = ["Inquest"]

_LAST_NOTES_S = 0.15
"""Before the bound is over, what has come of the other nodes has to do."""
_FINDING_S = 0.5
"""After the bound, for the finding of the node that decides to arrive."""


class Inquest:
    """Of one cycle on this node. Times are ``time.monotonic`` seconds."""

    def __init__(self, node: Node, record: CycleRecord, peers: Peers | None) -> None:
        self._node = node
        self._record = record
        self._peers = None if node.policy.is_common else peers
        self._notes: dict[int, RankNote] = {}
        """By local rank."""
        self._verdict: HangVerdict | None = None
        """The first of this node."""
        self._bound_s: float | None = None
        self._asked: set[int] = set()
        self._published = False
        self._over = False
        self._timers: list[Timer] = []

    def heard(self, local_rank: int, message: Message) -> None:
        """What a monitor says."""
        if message["type"] not in ("verdict", "evidence") or message.get("cycle") != self._record.cycle:
            return
        if self._over:
            self._node.monitors.release()
        elif message["type"] == "evidence":
            note, before = RankNote.from_dict(message["note"]), self._notes.get(local_rank)
            if before is not None:
                # what was looked at first counts: since then a rank may have been stopped by its monitor
                note = dataclasses.replace(before, found_hung=before.found_hung or note.found_hung)
            self._notes[local_rank] = note
            self._go_on()
        elif not message.get("observed_only"):
            verdict = hang_verdict(message, local_rank=local_rank)
            self._verdict = self._verdict or verdict
            self._begin(at_s=verdict.at_ns / 1e9, known={local_rank})

    def close(self) -> None:
        """The cycle is being ended: nobody is looked at any more, and who was found hung needn't wait for that.

        Its ranks may be saving something, if that is because somebody asked for it: they are left alone.
        """
        for timer in self._timers:
            timer.cancel()
        self._end()

    def is_open(self) -> bool:
        """Whether the cause may still become known, so that the cycle is not yet to be ended."""
        if self._over:
            return False
        if self._peers is not None and self._peers.view.hang is not None and self._bound_s is None:
            self._begin(at_s=time.monotonic(), known=set())
        if self._bound_s is not None:
            self._go_on()
        return self._bound_s is not None and not self._over

    def _begin(self, *, at_s: float, known: set[int]) -> None:
        """Have all ranks looked at that nobody has looked at; ``known`` are looked at already."""
        if self._bound_s is not None or self._over:
            return
        self._bound_s = at_s + LOOK_S
        if self._peers is not None and self._peers.view.hang is None:
            self._peers.hang_seen()
        self._asked = self._alive()
        for local_rank in self._asked - known:
            passive = self._node.policy.is_common
            self._node.monitors.collect(local_rank, passive=passive, deadline_ns=round(self._bound_s * 1e9))
        for delay_s in (LOOK_S - _LAST_NOTES_S, LOOK_S, LOOK_S + _FINDING_S):
            self._timers.append(self._node.reactor.call_later(delay_s, self._go_on))
        self._go_on()

    def _go_on(self) -> None:
        """Do what can be done by now."""
        if self._over:
            self._node.monitors.release()  # of a rank that was found hung later
            return
        if self._bound_s is None:
            return
        now = time.monotonic()
        here = self._asked & self._alive() <= self._notes.keys() or now >= self._bound_s - _LAST_NOTES_S
        if self._peers is None:
            if here:
                self._decide(list(self._local()))
        elif here and not self._published:
            self._published = True
            self._peers.publish(json.dumps([note.to_dict() for note in self._local()]))
        if self._peers is not None and self._published and self._peers.view.hang == self._peers.number:
            self._peers.gather()
            self._decide_for_all(now, self._peers)
        if self._peers is not None and not self._over:
            self._hear_of_it(now, self._peers)

    def _decide_for_all(self, now: float, peers: Peers) -> None:
        assert self._bound_s is not None
        told = peers.notes()
        others = len(peers.view.nodes) - 1 - len(peers.view.gone - {peers.number})
        if len(told) < others and now < self._bound_s - _LAST_NOTES_S:
            return
        if self._record.found is None:
            notes = [note for text in told.values() for note in _read(text)]
            self._record.found = self._cause([*self._local(), *notes], are_all=len(told) == others)
            if self._record.found is not None:
                peers.hang_found(self._record.found)

    def _hear_of_it(self, now: float, peers: Peers) -> None:
        assert self._bound_s is not None
        found = found_by(peers)
        if found is not None or now >= self._bound_s + _FINDING_S:
            # where the others can't be asked: who is seen to wait for them isn't accused
            self._record.found = found or self._record.found or self._cause(self._local(), are_all=False)
            self._end()

    def _decide(self, notes: list[RankNote]) -> None:
        self._record.found = self._cause(notes, are_all=True)
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._peers is not None:
            self._peers.stop_gathering()
        self._node.monitors.release()

    def _cause(self, notes: list[RankNote], *, are_all: bool) -> Cause | None:
        """What the notes come to, in words; None if there are none. ``are_all``: none of the job's is missing."""
        first = self._verdict
        if first is None or not any(note.has_stack or note.state for note in notes):
            return None
        finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all)
        self._node.log.write("finding", cycle=self._record.cycle, **dataclasses.asdict(finding))
        if finding.rank is None:
            return hang_of_nobody(first, detail=finding.text)
        note = next(note for note in notes if note.rank == finding.rank)
        return self._blamed(finding, note, first)

    def _blamed(self, finding: Finding, note: RankNote, first: HangVerdict) -> Cause:
        verdict = first if note.rank == first.rank else as_verdict(_view(note, first.at_ns), first)
        verdict = dataclasses.replace(verdict, stopped=note.is_stopped)
        several = self._peers is not None and len(self._peers.view.nodes) > 1
        where = f" ({note.host})" if several and note.host else ""
        did = "is what the others wait for" if note.gone else describe_overdue(verdict)
        kind = CauseKind.HANG
        if note.raised:  # it would be a crash, if only it ended
            did, kind = f"raised {note.raised}", CauseKind.CRASH
        text = f"rank {note.rank}{where} {did}"
        return Cause(kind=kind, text=text, rank=note.rank, iteration=verdict.iteration, detail=finding.text)

    def _alive(self) -> set[int]:
        """Local ranks whose processes run and whose monitors watch them."""
        running = self._record.workers.keys() - self._record.exits.keys()
        return {local_rank for local_rank in running if self._node.monitors.watches(local_rank, self._record.cycle)}

    def _local(self) -> list[RankNote]:
        """A note on each rank of this node, with what is known of those that nobody could look at."""
        return [self._notes.get(local_rank) or self._little(local_rank) for local_rank in self._record.workers]

    def _little(self, local_rank: int) -> RankNote:
        worker = self._record.workers[local_rank]
        gone = local_rank in self._record.exits
        words = crash_evidence.read_last_words(self._node, self._record, local_rank) if gone else LastWords()
        return RankNote(
            rank=self._record.global_ranks[local_rank],
            local_rank=local_rank,
            pid=worker.pid,
            iteration=self._record.iteration_of(local_rank),
            gone=gone,
            raised=words.error,
            frame=words.where,
        )


def _read(text: str) -> list[RankNote]:
    """The notes of another node; none if they are of a launcher that speaks otherwise."""
    try:
        return [RankNote.from_dict(each) for each in json.loads(text)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _view(note: RankNote, at_ns: int) -> RankView:
    """A note as the view of a rank that some other one's verdict, spoken at ``at_ns``, is turned on."""
    return RankView(
        rank=note.rank,
        local_rank=note.local_rank,
        stopped=note.is_stopped,
        iteration=note.iteration,
        section=note.section,
        since_ns=at_ns - round(note.open_s * 1e9),
        timeout_s=note.timeout_s,
        closing=note.closing,
    )
