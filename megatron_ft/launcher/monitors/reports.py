"""What a monitor tells the launcher: whether it can be worked with, and its verdict as the launcher speaks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankNote
from megatron_ft.core.errors import ProtocolError
from megatron_ft.ipc.wire import Message, shown

__all__ = ["check_report", "hang_verdict"]

_ATTACHED_FDS = 5
"""The board, and what a monitor that comes in this one's place would need to go on with the rank."""
_MOST = 1 << 63


def check_report(message: Message, fd_count: int) -> None:
    """Let pass what the launcher can work with; types that it doesn't know say nothing to it.

    Raises:
        ProtocolError: a monitor that was damaged, or one of another version, which must not take the launcher with it.
    """
    kind = message["type"]
    if kind == "attached" and fd_count != _ATTACHED_FDS:
        raise ProtocolError(f"'attached' comes with {_ATTACHED_FDS} descriptors, not {fd_count}")
    for name, is_right in _FIELDS.get(kind, {}).items():
        if not is_right(message.get(name)):
            raise ProtocolError(f"{kind!r} has {name} = {shown(message.get(name))}")
    if kind == "evidence":
        _check_note(message["note"])


def hang_verdict(message: Message, *, local_rank: int) -> HangVerdict:
    """A monitor's verdict as the launcher speaks of it."""
    return HangVerdict(
        rank=int(message["rank"]),
        local_rank=local_rank,
        kind=str(message["kind"]),
        section=message.get("section"),
        elapsed_s=float(message["elapsed_s"]),
        timeout_s=float(message["timeout_s"]),
        iteration=message.get("iteration"),
        at_ns=int(message["at_ns"]),
        stopped=message.get("state") == "T",
    )


def _check_note(document: Mapping[str, Any]) -> None:
    try:
        note = RankNote.from_dict(document)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"'evidence' has a note that is none: {type(error).__name__}") from None
    for name, is_right in _NOTE.items():
        if not is_right(getattr(note, name)):
            raise ProtocolError(f"'evidence' has a note with {name} = {shown(getattr(note, name))}")
    for each in note.in_flight:
        texts = (each.group, each.op, each.description, each.backend)
        if not (all(map(_is_text, texts)) and _is_count(each.seq) and all(map(_is_count, each.ranks))):
            raise ProtocolError("'evidence' has a note with a collective that is none")


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MOST


def _is_span(value: object) -> bool:
    """Seconds, from now on or before."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MOST <= value < _MOST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _or_none(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_right(value)


def _is_table_of_counts(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_count, value.values()))


_WHO: dict[str, Callable[[object], bool]] = {"rank": _is_count, "cycle": _is_count}
_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "attached": {**_WHO, "pid": _is_count, "user_code_ns": _or_none(_is_count), "at_ns": _or_none(_is_count)},
    "detached": {**_WHO, "at_ns": _is_count},
    "trains": {**_WHO, "at_ns": _is_count, "began_ns": _or_none(_is_count)},
    "verdict": {
        **_WHO,
        "kind": _is_text,
        "section": _or_none(_is_text),
        "elapsed_s": _is_seconds,
        "timeout_s": _is_seconds,
        "iteration": _or_none(_is_number),
        "at_ns": _is_count,
        "state": _or_none(_is_text),
    },
    "evidence": {**_WHO, "note": lambda value: isinstance(value, Mapping)},
    "signalled": {"signal": _is_text},
    "warning": {"text": _is_text},
}
_NOTE: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("rank", "local_rank", "pid"), _is_count),
    "iteration": _or_none(_is_number),
    **dict.fromkeys(("host", "state", "frame", "inner", "waits_in", "raised"), _is_text),
    "section": _or_none(_is_text),
    **dict.fromkeys(("open_s", "quiet_s"), _is_seconds),
    "timeout_s": _or_none(_is_seconds),
    "left_s": _or_none(_is_span),
    "lost": lambda value: isinstance(value, tuple) and all(map(_is_text, value)),
    "enqueued": _is_table_of_counts,
    **dict.fromkeys(
        ("found_hung", "is_busy", "has_stack", "is_saving", "is_in_library", "has_collectives", "closing", "gone"),
        _is_flag,
    ),
    "waits_for_process": _is_flag,
}
