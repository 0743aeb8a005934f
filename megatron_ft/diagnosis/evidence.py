"""Evidence on one rank that hangs or has ended, as written to files: JSON, and a page of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.diagnosis.stacks import REPORTER_THREAD, Frame
from megatron_ft.link.base.codec import Finite, Int, Message, to_builtins
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.process_facts import ProcessFacts
from megatron_ft.link.base.wording import printable, when
from megatron_ft.monitor.rules.hang_detector import Overdue

_SCHEMA = 1
_LONG = 16


class SectionEvidence(Message, frozen=True, kw_only=True):
    """A section that was open, in seconds. ``timeout_s`` None: no timeout."""

    name: str
    open_for_s: Finite
    timeout_s: Finite | None


class BoardFacts(Message, frozen=True, kw_only=True):
    """A board at one moment. ``quiet_s``: seconds since the last section event."""

    iteration: Int | None
    iterations_seen: Int
    heartbeats: Int
    quiet_s: Finite
    open_sections: tuple[SectionEvidence, ...]
    """Outermost first."""


class Thread(Message, frozen=True, kw_only=True):
    """One thread of a rank. ``main``: the main thread; ``frames``: its calls, innermost first."""

    ident: Int
    name: str
    main: bool
    frames: tuple[Frame, ...]


class Stacks(Message, frozen=True, kw_only=True):
    """Stacks of all known threads. ``source``: what wrote them."""

    source: str
    threads: tuple[Thread, ...]


@dataclass(frozen=True, kw_only=True)
class HangEvidence:
    """Evidence on a live rank: a hung one, or one whose peers hang.

    Args:
        verdict: why the rank was found hung; None if it wasn't.
        board: None if unreadable.
        last_events: seconds before collection, and the event; oldest first.
        missing: what couldn't be collected, and why.
    """

    note: RankSnapshot
    cycle: int
    verdict: Overdue | None
    board: BoardFacts | None
    last_events: tuple[tuple[float, str], ...]
    process: ProcessFacts
    stacks: Stacks
    collectives: Collectives
    missing: tuple[str, ...]
    took_s: float

    @property
    def rank(self) -> int:
        return self.note.rank

    @property
    def pid(self) -> int:
        return self.note.pid

    @property
    def summary(self) -> str:
        """The evidence in one line."""
        return f"rank {self.rank}: {place(self.note)}"

    def packed(self) -> dict[str, Any]:
        """Return the evidence for JSON."""
        return {
            "schema": _SCHEMA,
            "summary": self.summary,
            **to_builtins(self.note),
            "cycle": self.cycle,
            "verdict": None if self.verdict is None else _packed_verdict(self.verdict),
            "board": {**_packed_board(self.board), "last_events": self.last_events},
            "process": to_builtins(self.process),
            "stacks": to_builtins(self.stacks),
            "collectives": to_builtins(self.collectives),
            "missing": self.missing,
            "took_s": self.took_s,
        }


class ExitEvidence(Message, frozen=True, kw_only=True):
    """Evidence on a rank that has ended by itself.

    Args:
        exit: the exit in words: "code 1", "signal 11"; ``exitcode`` is negative for a signal.
        follows_from_another: another rank's exit explains it.
        board: None if unreadable.
        exception: its traceback; fatal_error: the stacks at a fatal signal; stderr: its last lines.
        missing: what couldn't be collected, and why.
    """

    summary: str
    rank: Int
    local_rank: Int
    host: str
    pid: Int
    cycle: Int
    iteration: Int | None
    exit: str
    exitcode: Int
    error: str | None
    follows_from_another: bool
    board: BoardFacts | None
    exception: str
    fatal_error: str
    stderr: str
    missing: tuple[str, ...]
    took_s: Finite

    def packed(self) -> dict[str, Any]:
        """Return the evidence for JSON."""
        return {"schema": _SCHEMA, **to_builtins(self), "board": _packed_board(self.board)}


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
    return {} if board is None else to_builtins(board)


# -- from the progress board ------------------------------------------------------------------------------------


def with_board(note: RankSnapshot, snapshot: BoardSnapshot | None, now_ns: int) -> RankSnapshot:
    """Return the snapshot completed from the board; unchanged if that is unreadable."""
    if snapshot is None:
        return note
    outermost = snapshot.open_sections[0] if snapshot.open_sections else None
    since_ns = snapshot.last_transition_ns if outermost is None else outermost.opened_at_ns
    timeout_ns = snapshot.out_of_section_timeout_ns if outermost is None else outermost.timeout_ns
    moved_ns, collective_s, counted = snapshot.last_transition_ns, None, snapshot.collectives
    seen_s: float | None = 0.0
    if note.frame and not (note.has_stack or note.raised):  # as the rank itself noted it
        seen_s = None if counted is None else round((now_ns - counted.seen_ns) / 1e9, 3)
    if counted is not None and snapshot.watch_only:
        moved_ns = since_ns = counted.moved_ns
        collective_s = round((now_ns - moved_ns) / 1e9, 3)
    due_ns = min((each.since_ns + each.timeout_ns for each in running_intervals(snapshot)), default=None)
    return replace(
        note,
        iteration=snapshot.iteration,
        section=None if outermost is None else outermost.name,
        timeout_s=None if timeout_ns is None else timeout_ns / 1e9,
        open_s=round((now_ns - since_ns) / 1e9, 3),
        quiet_s=round((now_ns - moved_ns) / 1e9, 3),
        left_s=None if due_ns is None else round((due_ns - now_ns) / 1e9, 3),
        closing=snapshot.closing,
        collective_s=collective_s,
        seen_s=seen_s,
    )


def board_facts(snapshot: BoardSnapshot | None, at_ns: int) -> BoardFacts | None:
    """Return the board in seconds before ``at_ns``; None if unreadable."""
    if snapshot is None:
        return None
    return BoardFacts(
        iteration=snapshot.iteration,
        iterations_seen=snapshot.iterations_seen,
        heartbeats=snapshot.heartbeats,
        quiet_s=(at_ns - snapshot.last_transition_ns) / 1e9,
        open_sections=tuple(
            SectionEvidence(
                name=section.name,
                open_for_s=(at_ns - section.opened_at_ns) / 1e9,
                timeout_s=None if section.timeout_ns is None else section.timeout_ns / 1e9,
            )
            for section in snapshot.open_sections
        ),
    )


# -- as text ----------------------------------------------------------------------------------------------------


def evidence_text(evidence: Evidence) -> str:
    """Return the evidence as a page of text."""
    return "\n".join(printable(line).rstrip() for line in _lines(evidence)) + "\n"


def _lines(evidence: Evidence) -> Iterator[str]:
    yield evidence.summary
    yield ""
    yield from (f"{name + ':':<14}{value}" for name, value in _head(evidence).items() if value not in (None, ""))
    if evidence.board is not None:
        yield from _board(evidence.board)
    if isinstance(evidence, HangEvidence):
        yield from (f"{'lost:':<14}{lost}" for lost in evidence.note.lost)
        yield from _process(evidence.process)
        yield from _collectives(evidence.collectives)
        yield from _stacks(evidence.stacks)
        events = (f"{age:10.3f}  {what}" for age, what in evidence.last_events)
        yield from _titled("last events (seconds before this was written)", events)
    else:
        yield from _titled("fatal error", evidence.fatal_error.splitlines())
        yield from _titled("exception", evidence.exception.splitlines())
        yield from _titled("stderr", evidence.stderr.splitlines())
    yield from _titled("could not be collected", evidence.missing)
    yield ""
    yield f"collected in {evidence.took_s:.3f} s"


def _head(evidence: Evidence) -> dict[str, object]:
    who = evidence.note if isinstance(evidence, HangEvidence) else evidence
    head: dict[str, object] = {
        "rank": who.rank,
        "local_rank": who.local_rank,
        "host": who.host,
        "pid": who.pid,
        "cycle": evidence.cycle,
        "iteration": None if who.iteration is None else when(who.iteration),
    }
    if isinstance(evidence, HangEvidence):
        return {**head, "local_rank": evidence.note.local_rank or None}  # 0 is left out, as in the snapshot
    return {**head, "exit": evidence.exit, "error": evidence.error}


def _board(board: BoardFacts) -> Iterator[str]:
    for section in board.open_sections:
        bound = "no timeout" if section.timeout_s is None else f"timeout {section.timeout_s:g} s"
        yield f"{'section:':<14}{section.name}, open for {section.open_for_s:.3f} s ({bound})"
    if not board.open_sections:
        yield f"{'section:':<14}none, since {board.quiet_s:.3f} s"


def _process(facts: ProcessFacts) -> Iterator[str]:
    if facts.state:
        wchan = f" in {facts.wchan}" if facts.wchan not in ("", "0") else ""
        yield f"{'process:':<14}state {facts.state}{wchan}, {len(facts.threads)} threads"


def _collectives(collectives: Collectives) -> Iterator[str]:
    if collectives.error:
        return
    yield ""
    yield "collectives in flight (torch's flight recorder):"
    for each in collectives.in_flight:
        ranks = collectives.ranks.get(each.group)
        of = "" if ranks is None else f", ranks {_members(ranks)}"
        yield f"  {each.op} {each.seq} of group {each.description or each.group}{of}"
    if not collectives.in_flight:
        yield "  none"


def _members(group: Sequence[int]) -> str:
    if isinstance(group, range) and len(group) > _LONG:
        return f"{group[0]} to {group[-1]}" + (f" in steps of {group.step}" if group.step > 1 else "")
    return ", ".join(map(str, group))


def _stacks(stacks: Stacks) -> Iterator[str]:
    for thread in sorted(stacks.threads, key=lambda thread: not thread.main):
        if any(each.function == REPORTER_THREAD for each in thread.frames):
            continue  # this package's own, asleep
        yield ""
        name = "main thread" if thread.main else f"thread {thread.name or hex(thread.ident)}"
        yield f"{name} (innermost call first, by {stacks.source}):"
        yield from (f'  File "{each.file}", line {each.line}, in {each.function}' for each in thread.frames)


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Return a paragraph; nothing if it would have no lines."""
    found = [f"  {line}" for line in lines]
    yield from ["", f"{title}:", *found] if found else []
