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

from megatron_ft.link.base.codec import name_of
from megatron_ft.link.facts import SCHEMA, launcher, monitor, rank, shared

__all__ = ["PATH", "page"]

PATH = Path(__file__).parents[2] / "docs" / "event-log.md"
_HEAD = f"""\
# The event log

Each launcher writes one file into the log directory (`--ft-log-dir`), also with what its ranks' monitors tell:
`launcher-HOST-PID-TIME.jsonl`, one JSON object a line. A monitor whose launcher has died writes a file of its own
(`monitor-...`), and so does a rank that injects a fault (`rank-...`). The report reads nothing else; your scripts
may read them, too, also while they are written.

- `t` is nanoseconds of CLOCK_MONOTONIC of the host, `ev` the name of the record. The first one of a file,
  `log_opened`, tells who writes; its `wall_ns - t` turns the times of the file into nanoseconds since the epoch.
  Compare times of several hosts only through that.
- `schema` is {SCHEMA}. Within a version records and fields are added, and nothing else changes: ignore what you don't
  know.
- A crash or a full disk may cut a line off: ignore what is no JSON object. A log above 200 MB goes on in a new file
  with the same header; the newest before it is kept as `.before.jsonl`.
- `iteration` is the number of completed iterations. Cycles count from 0 on all nodes alike.
- Fields in bold are always there; others may be null, or missing in older logs. A field without a type is text or a
  number; `rank` is a global rank, `pid` a process id; names in `_ns` are nanoseconds like `t`, those in `_s` seconds.
- A row of `minute.ranks` is `[rank, from, to, lost events, [[iteration, began], ...], sections]`, with the first and
  the last iteration, times in seconds after `at_ns`. `sections` is an object by name, also `out_of_section` and
  `heartbeat`, of `[number, total, longest, first, open, sections around it, [[began, length], ...], {{bucket: count,
  ...}}]`: beginnings of at most 6 intervals; `first` is the longest of the first 4 times out of section of the cycle;
  `open` is the age of the open one, -1 for none; ten buckets per decade, of which number 40 ends at 10 s.

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
_KNOWN = ("rank", "local_rank", "cycle", "pid", "iteration", "seconds")
_PLAIN = {int: "number", float: "number", str: "text", bool: "boolean", Any: "anything"}


def page() -> str:
    """The whole page."""
    text = "\n".join([_HEAD, *(line for title, of in PARTS for line in _part(title, of))])
    return text.rstrip().replace("``", "`") + "\n"


def kinds(of: Any) -> tuple[Any, ...]:
    """Classes of the records in a module."""
    return typing.get_args(of.Record) or (of.Record,)


def _part(title: str, of: Any) -> Iterator[str]:
    described: set[str] = set()
    yield f"## {title}\n"
    for kind in kinds(of):
        yield f"### `{name_of(kind)}`\n"
        yield f"{_summary(kind)}\n"
        lines = list(_fields(kind, described))
        yield from [*lines, ""] if lines else []


def _fields(kind: Any, described: set[str]) -> Iterator[str]:
    """Yield the fields without a comment in one line, then a line for each of the others and for each inner class."""
    hints, meanings = typing.get_type_hints(kind, include_extras=True), _meanings(kind)
    plain, told = [], []
    for field in msgspec.structs.fields(kind):
        name = f"**`{field.name}`**" if field.required else f"`{field.name}`"
        kind_of = "" if field.name in _KNOWN or field.name.endswith(("_ns", "_s")) else _type(field.type)
        typed = name if kind_of in ("", "text", "number", "count") else f"{name} ({kind_of})"
        meaning = meanings.get(field.name, "")
        (told if meaning else plain).append(f"- {typed}: {meaning}" if meaning else typed)
    if plain:
        yield f"- {', '.join(plain)}"
    yield from told
    for name, hint in hints.items():
        inner = _inner(hint)
        if _is_struct(inner) and not inner.__struct_config__.array_like:
            if inner.__name__ in described:
                yield f"- in `{name}`: as above"
                continue
            described.add(inner.__name__)
            yield f"- in `{name}`: {_summary(inner)[0].lower()}{_summary(inner)[1:]}"
            yield from (f"  {line}" for line in _fields(inner, described))


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
        return _type(inner)
    if origin in (tuple, list) and arguments[0] is not Any:
        return _plural(_type(arguments[0]))
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
