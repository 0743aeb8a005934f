"""docs/event-log.md, made from the classes of the records: `python -m tests.support.event_log_page` writes it."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_ft.core.codec import name_of
from megatron_ft.core.facts import SCHEMA, launcher, monitor, rank, shared

__all__ = ["PATH", "page"]

PATH = Path(__file__).parents[2] / "docs" / "event-log.md"
_HEAD = f"""\
# The event log

Each launcher writes one file into the log directory (`--ft-log-dir`), with what its ranks' monitors tell:
`launcher-HOST-PID-TIME.jsonl`, one JSON object a line. A monitor whose launcher has died writes a file of its own
(`monitor-...`), and so does a rank that injects a fault or calculates timeouts itself (`rank-...`). The report reads
nothing else; scripts of yours may read them, too, also while they are written. This page is made from the classes
that write and read them (`megatron_ft/core/facts/`), and a test holds the two together.

What ranks do is logged as a `minute` for all ranks of a node, about 250 bytes for each of them, and as `progress`: the
last 512 section events of a rank, at its end and with evidence on it.

A row of `minute.ranks` is `[rank, from, to, lost events, [[iteration, began], ...], sections]` with its first and last
iteration. `sections` is an object, by name, also `out_of_section` and `heartbeat`; each is
`[number, total, longest, first, open, sections around it, [[began, length], ...], {{bucket: count, ...}}]`. Beginnings
are there if there were at most 6; `first` is the longest of the first 4 times out of section of the cycle, `longest`
that of all others, `open` the age of the open one, -1 none. The last is a histogram of the others, ten buckets per
decade: those with the numbers 31 to 40 end at 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8 and 10 s. Times are seconds.

- Every record has `t`, nanoseconds of CLOCK_MONOTONIC of its host, and `ev`, its name. The first one of a file,
  `log_opened`, tells who writes; its `wall_ns - t` turns the times of the file into nanoseconds since the epoch. Times
  of one host can be compared as they are, those of several only through that.
- `schema` is {SCHEMA}. Within a version records and fields are added, and nothing else changes: pass over what you
  don't know. Fields in bold are always there; others may be null, or missing in a log of an older version.
- A line may be cut off by a crash or torn by a full disk: pass over what is no JSON object. A log that has become too
  large (200 MB for those of one process) goes on in a new file with the same header; of the file before, which then
  ends in `.before.jsonl`, the newest is kept.
- `iteration` is how many iterations are done. Cycles count from 0; all nodes number them alike.

    import json
    for line in open(path):
        record = json.loads(line)
        if record["ev"] == "cycle_ended" and record["cause"]:
            print(record["cycle"], record["cause"]["kind"], record["cause"]["text"])
"""
PARTS = (
    ("Records of every process", shared),
    ("Records of a launcher", launcher),
    ("Records of a monitor", monitor),
    ("Records of a rank", rank),
)
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


def page() -> str:
    """The whole page."""
    text = "\n".join([_HEAD, *(line for title, of in PARTS for line in _part(title, of))])
    return text.rstrip().replace("``", "`") + "\n"


def kinds(of: Any) -> tuple[Any, ...]:
    """Classes of the records in a module."""
    return typing.get_args(of.Record) or (of.Record,)


def _part(title: str, of: Any) -> Iterator[str]:
    yield f"## {title}\n"
    for kind in kinds(of):
        yield f"### `{name_of(kind)}`\n"
        yield f"{_summary(kind)}\n"
        yield from _table(kind)


def _table(kind: Any) -> Iterator[str]:
    hints, meanings = typing.get_type_hints(kind, include_extras=True), _meanings(kind)
    if not hints:
        return
    yield "| field | type | |\n|---|---|---|"
    for field in msgspec.structs.fields(kind):
        name = f"**`{field.name}`**" if field.required else f"`{field.name}`"
        yield f"| {name} | {_type(field.type)} | {meanings.get(field.name, '')} |"
    yield ""
    for name, hint in hints.items():
        inner = _inner(hint)
        if _is_struct(inner) and not inner.__struct_config__.array_like:
            yield f"`{name}`: {_summary(inner)[0].lower()}{_summary(inner)[1:]}\n"
            yield from _table(inner)


def _inner(hint: Any) -> Any:
    """The class that a field holds, or holds some of."""
    arguments = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis, str)]
    return _inner(arguments[0]) if arguments and typing.get_origin(hint) is not Annotated else hint


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((e.description for e in arguments[1:] if e.description), _type(arguments[0]))
    if origin in (typing.Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        return f"{_type(inner)}, or null"
    if origin in (tuple, list) and arguments[0] is not Any:
        return f"list of {_plural(_type(arguments[0]))}"
    if origin is not None and issubclass(origin, Mapping):
        return f"object, by name: {_type(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "text"
    if _is_struct(hint):
        return "row" if hint.__struct_config__.array_like else "object"
    return _PLAIN[hint]


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _plural(name: str) -> str:
    return "process ids" if name == "process id" else name if name.endswith("s") else f"{name}s"


def _summary(kind: Any) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def _meanings(kind: Any) -> dict[str, str]:
    """What the docstring says of each field."""
    told = (inspect.getdoc(kind) or "").partition("Args:")[2]  # Python 3.13 takes the indentation off, older ones don't
    found = re.findall(r"^ {4}([\w, ]+): ((?:.|\n {8})+)", told, flags=re.M)
    meanings = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
    assert meanings.keys() <= set(kind.__struct_fields__), (kind, meanings)
    return meanings


if __name__ == "__main__":
    PATH.write_text(page())
