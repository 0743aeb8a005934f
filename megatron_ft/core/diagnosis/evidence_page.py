"""The evidence on one rank as readable text: what, since when, where. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_ft.core.diagnosis.board_facts import BoardFacts
from megatron_ft.core.diagnosis.collectives import Collectives, NoCollectives
from megatron_ft.core.diagnosis.evidence import Evidence, HangEvidence, Stacks
from megatron_ft.core.diagnosis.stacks import REPORTER_THREAD
from megatron_ft.core.process_facts import ProcessFacts
from megatron_ft.core.wording import printable, when

__all__ = ["evidence_text"]

_LONG = 16


def evidence_text(evidence: Evidence) -> str:
    """The readable form of the evidence on one rank."""
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
        return {**head, "local_rank": evidence.note.local_rank or None}  # 0 is left out, as in the note
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


def _collectives(told: Collectives | NoCollectives) -> Iterator[str]:
    if isinstance(told, NoCollectives):
        return
    yield ""
    yield "collectives in flight (torch's flight recorder):"
    for each in told.in_flight:
        ranks = told.ranks.get(each.group)
        of = "" if ranks is None else f", ranks {_members(ranks)}"
        yield f"  {each.op} {each.seq} of group {each.description or each.group}{of}"
    if not told.in_flight:
        yield "  none"


def _members(group: Sequence[int]) -> str:
    if isinstance(group, range) and len(group) > _LONG:
        return f"{group[0]} to {group[-1]}" + (f" in steps of {group.step}" if group.step > 1 else "")
    return ", ".join(map(str, group))


def _stacks(stacks: Stacks) -> Iterator[str]:
    for thread in sorted(stacks.threads, key=lambda thread: not thread.main):
        if any(each.function == REPORTER_THREAD for each in thread.frames):
            continue  # ours, asleep
        yield ""
        name = "main thread" if thread.main else f"thread {thread.name or hex(thread.ident)}"
        yield f"{name} (innermost call first, by {stacks.source}):"
        yield from (f'  File "{each.file}", line {each.line}, in {each.function}' for each in thread.frames)


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A paragraph; nothing if it would have no lines."""
    found = [f"  {line}" for line in lines]
    yield from ["", f"{title}:", *found] if found else []
