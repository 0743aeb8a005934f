"""The evidence on one rank, as it is put into a file: a rank that hangs, or one that has ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.core.board.hang_detector import Overdue
from megatron_ft.core.codec import fields
from megatron_ft.core.diagnosis.board_facts import BoardFacts
from megatron_ft.core.diagnosis.collectives import Collectives, NoCollectives
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.core.diagnosis.stacks import Frame
from megatron_ft.core.process_facts import ProcessFacts

__all__ = ["Evidence", "ExitEvidence", "HangEvidence", "Stacks", "Thread"]

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread of a rank. ``main``: it is the main one; ``frames``: its calls, the innermost first."""

    ident: int
    name: str
    main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Of all threads that are known. ``source``: who wrote them."""

    source: str
    threads: tuple[Thread, ...]


@dataclass(frozen=True, kw_only=True)
class HangEvidence:
    """On a rank that hadn't ended: of a hung rank, or of one whose peers hang.

    Args:
        verdict: why it was found hung; None if it wasn't.
        board: None where it couldn't be read.
        last_events: seconds before the evidence was collected, and what happened; oldest first.
        missing: what couldn't be collected, and why.
    """

    note: RankSnapshot
    cycle: int
    verdict: Overdue | None
    board: BoardFacts | None
    last_events: tuple[tuple[float, str], ...]
    process: ProcessFacts
    stacks: Stacks
    collectives: Collectives | NoCollectives
    missing: tuple[str, ...]
    took_s: float

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.note.rank

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.note.pid

    @property
    def summary(self) -> str:
        """In one line."""
        return f"rank {self.rank}: {place(self.note)}"

    def packed(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": _SCHEMA,
            "summary": self.summary,
            **fields(self.note),
            "cycle": self.cycle,
            "verdict": None if self.verdict is None else _packed_verdict(self.verdict),
            "board": {**_packed_board(self.board), "last_events": self.last_events},
            "process": fields(self.process),
            "stacks": fields(self.stacks),
            "collectives": fields(self.collectives),
            "missing": self.missing,
            "took_s": self.took_s,
        }


@dataclass(frozen=True, kw_only=True)
class ExitEvidence:
    """On a rank that has ended by itself.

    Args:
        exit: how, in words: "code 1", "signal 11"; ``exitcode`` is negative for a signal.
        follows_from_another: another rank's end explains it.
        board: None where it couldn't be read.
        exception: its traceback; fatal_error: the stacks at a fatal signal; stderr: its last lines.
        missing: what couldn't be collected, and why.
    """

    summary: str
    rank: int
    local_rank: int
    host: str
    pid: int
    cycle: int
    iteration: int | None
    exit: str
    exitcode: int
    error: str | None
    follows_from_another: bool
    board: BoardFacts | None
    exception: str
    fatal_error: str
    stderr: str
    missing: tuple[str, ...]
    took_s: float

    def packed(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": _SCHEMA, **fields(self), "board": _packed_board(self.board)}


Evidence = HangEvidence | ExitEvidence


def _packed_verdict(verdict: Overdue) -> dict[str, Any]:
    return {
        "kind": verdict.kind.value,
        "section": verdict.section,
        "elapsed_s": verdict.elapsed_ns / 1e9,
        "timeout_s": verdict.timeout_ns / 1e9,
        "since_ns": verdict.since_ns,
    }


def _packed_board(board: BoardFacts | None) -> dict[str, Any]:
    return {} if board is None else fields(board)
