"""Evidence on one rank that hangs or has ended, as written to files: JSON, and a page of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective, Collectives
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.diagnosis.stacks import REPORTER_THREAD, ThreadStack
from megatron_ft.link.base.codec import Fact, Finite, Int, to_builtins
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.base.process_facts import ProcessFacts
from megatron_ft.link.base.wording import printable, when
from megatron_ft.link.facts.shared import RankHung

_SCHEMA = 2
_LONG = 16


class OpenSection(Fact, frozen=True, kw_only=True):
    """A section that was open, in seconds. ``timeout_s`` None: no timeout. ``enforced`` False: only reported."""

    name: str
    open_s: Finite
    timeout_s: Finite | None
    enforced: bool = True


class RankEvidence(Fact, frozen=True, kw_only=True):
    """Evidence on one rank: it hangs, its peers do, or it has ended by itself.

    Args:
        summary: the evidence in one line.
        verdict: why the rank was found hung; None if it wasn't.
        open_sections: outermost first; None if the board is unreadable.
        last_events: seconds before collection, and the event; oldest first.
        stacks_by: what wrote the stacks of ``threads``.
        exception: its traceback; fatal_error: the stacks at a fatal signal; stderr: its last lines.
        missing: what couldn't be collected, and why.
    """

    summary: str
    note: RankSnapshot
    cycle: Int
    verdict: RankHung | None = None
    open_sections: tuple[OpenSection, ...] | None = None
    last_events: tuple[tuple[float, str], ...] = ()
    process: ProcessFacts = ProcessFacts()
    stacks_by: str = ""
    threads: tuple[ThreadStack, ...] = ()
    collectives: Collectives | None = None
    exception: str = ""
    fatal_error: str = ""
    stderr: str = ""
    missing: tuple[str, ...] = ()
    took_s: Finite = 0.0

    def packed(self) -> dict[str, Any]:
        """Return the evidence for JSON; facts of the snapshot at their default are left out."""
        found = to_builtins(self)
        return {"schema": _SCHEMA, "summary": found.pop("summary"), **found.pop("note"), **found}


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


def open_sections(snapshot: BoardSnapshot | None, at_ns: int) -> tuple[OpenSection, ...] | None:
    """Return the open sections of a board in seconds before ``at_ns``; None if it is unreadable."""
    if snapshot is None:
        return None
    return tuple(
        OpenSection(
            name=section.name,
            open_s=(at_ns - section.opened_at_ns) / 1e9,
            timeout_s=None if section.timeout_ns is None else section.timeout_ns / 1e9,
            enforced=section.armed is None or section.armed.enforced,
        )
        for section in snapshot.open_sections
    )


# -- as text ----------------------------------------------------------------------------------------------------


def evidence_text(evidence: RankEvidence) -> str:
    """Return the evidence as a page of text."""
    return "\n".join(printable(line).rstrip() for line in _lines(evidence)) + "\n"


def _lines(evidence: RankEvidence) -> Iterator[str]:
    yield from (evidence.summary, "")
    yield from (f"{name + ':':<14}{value}" for name, value in _facts(evidence) if value not in (None, ""))
    told = evidence.collectives
    if told is not None and not told.error:
        yield from ("", "collectives in flight (torch's flight recorder):")
        yield from map(_collective, told.in_flight)
        if not told.in_flight:
            yield "  none"
    for thread in sorted(evidence.threads, key=lambda thread: not thread.main):
        if not any(each.function == REPORTER_THREAD for each in thread.frames):  # this package's own is asleep
            name = "main thread" if thread.main else f"thread {thread.name or hex(thread.ident)}"
            yield from ("", f"{name} (innermost call first, by {evidence.stacks_by}):")
            yield from (f'  File "{each.file}", line {each.line}, in {each.function}' for each in thread.frames)
    events = (f"{age:10.3f}  {what}" for age, what in evidence.last_events)
    yield from _titled("last events (seconds before this was written)", events)
    yield from _titled("fatal error", evidence.fatal_error.splitlines())
    yield from _titled("exception", evidence.exception.splitlines())
    yield from _titled("stderr", evidence.stderr.splitlines())
    yield from _titled("could not be collected", evidence.missing)
    yield from ("", f"collected in {evidence.took_s:.3f} s")


def _facts(evidence: RankEvidence) -> Iterator[tuple[str, object]]:
    note, process, code = evidence.note, evidence.process, evidence.note.exitcode
    yield from ((name, getattr(note, name)) for name in ("rank", "local_rank", "host", "pid"))
    yield "cycle", evidence.cycle
    yield "iteration", None if note.iteration is None else when(note.iteration)
    yield "exit", None if code is None else f"code {code}" if code >= 0 else f"signal {-code}"
    yield "error", note.raised
    for section in evidence.open_sections or ():
        bound = "no timeout" if section.timeout_s is None else f"timeout {section.timeout_s:g} s"
        bound += "" if section.enforced else ", only reported"
        yield "section", f"{section.name}, open for {section.open_s:.3f} s ({bound})"
    if evidence.open_sections == ():
        yield "section", f"none, since {note.quiet_s:.3f} s"
    yield from (("lost", lost) for lost in note.lost)
    if process.state:
        wchan = f" in {process.wchan}" if process.wchan not in ("", "0") else ""
        yield "process", f"state {process.state}{wchan}, {len(process.threads)} threads"


def _collective(entered: Collective) -> str:
    group, ranks = entered.description or entered.group, entered.ranks
    members = ", ".join(map(str, ranks))
    if isinstance(ranks, range) and len(ranks) > _LONG:
        members = f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {ranks.step}" if ranks.step > 1 else "")
    return f"  {entered.op} {entered.seq} of group {group}" + (f", ranks {members}" if members else "")


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Return a paragraph; nothing if it would have no lines."""
    found = [f"  {line}" for line in lines]
    yield from ["", f"{title}:", *found] if found else []
