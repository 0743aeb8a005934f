"""The evidence on one rank as readable text: what, since when, where. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ft.core.diagnosis.rank_snapshot import unpacked
from megatron_ft.core.diagnosis.stacks import REPORTER_THREAD
from megatron_ft.core.iterations import when
from megatron_ft.core.printable import printable

__all__ = ["evidence_text"]

_LONG = 16


def evidence_text(document: Mapping[str, Any]) -> str:
    """The readable form of an evidence document (see ``monitor.evidence``, ``launcher.processes.crash_evidence``)."""
    return "\n".join(printable(line).rstrip() for line in _lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield document.get("summary", "")
    yield ""
    for name in ("rank", "local_rank", "host", "pid", "cycle", "iteration", "exit", "error"):
        value = document.get(name)
        if value not in (None, ""):
            yield f"{name + ':':<14}{when(value) if name == 'iteration' and type(value) is int else value}"
    board = document.get("board") or {}
    for section in board.get("open_sections") or ():
        timeout = section.get("timeout_s")
        bound = "no timeout" if timeout is None else f"timeout {timeout:g} s"
        yield f"{'section:':<14}{section['name']}, open for {section['open_for_s']:.3f} s ({bound})"
    if board and not board.get("open_sections"):
        yield f"{'section:':<14}none, since {board.get('quiet_s', 0.0):.3f} s"
    for lost in document.get("lost") or ():
        yield f"{'lost:':<14}{lost}"
    yield from _process(document.get("process") or {})
    yield from _collectives(document.get("collectives") or {})
    yield from _stacks(document.get("stacks") or {})
    for title in ("fatal_error", "exception", "stderr"):
        if document.get(title):
            yield ""
            yield f"{title.replace('_', ' ')}:"
            yield from (f"  {line}" for line in str(document[title]).splitlines())
    events = board.get("last_events") or ()
    if events:
        yield ""
        yield "last events (seconds before this was written):"
        yield from (f"  {age:10.3f}  {what}" for age, what in events)
    if document.get("missing"):
        yield ""
        yield "could not be collected:"
        yield from (f"  {text}" for text in document["missing"])
    if document.get("took_s") is not None:
        yield ""
        yield f"collected in {document['took_s']:.3f} s"


def _process(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts:
        return
    wchan = f" in {facts['wchan']}" if facts.get("wchan") not in (None, "", "0") else ""
    yield f"{'process:':<14}state {facts.get('state', '?')}{wchan}, {len(facts.get('threads') or ())} threads"


def _collectives(answer: Mapping[str, Any]) -> Iterator[str]:
    if "error" in answer or not answer:
        return
    yield ""
    yield "collectives in flight (torch's flight recorder):"
    for each in answer.get("in_flight") or ():
        ranks = (answer.get("ranks") or {}).get(each["group"])
        of = "" if ranks is None else f", ranks {_members(ranks)}"
        yield f"  {each['op']} {each['seq']} of group {each['description'] or each['group']}{of}"
    if not answer.get("in_flight"):
        yield "  none"


def _members(ranks: Any) -> str:
    group = unpacked(ranks)
    if isinstance(group, range) and len(group) > _LONG:
        return f"{group[0]} to {group[-1]}" + (f" in steps of {group.step}" if group.step > 1 else "")
    return ", ".join(map(str, group))


def _stacks(stacks: Mapping[str, Any]) -> Iterator[str]:
    threads = sorted(stacks.get("threads") or (), key=lambda thread: not thread.get("main"))
    for thread in threads:
        if any(function == REPORTER_THREAD for _, _, function in thread["frames"]):
            continue  # ours, asleep
        yield ""
        name = "main thread" if thread.get("main") else f"thread {thread.get('name') or hex(thread['ident'])}"
        yield f"{name} (innermost call first, by {stacks['source']}):"
        yield from (f'  File "{file}", line {line}, in {function}' for file, line, function in thread["frames"])
