"""JSON codec of messages and records: frozen dataclasses, read and written by their annotations. Pure.

Input from outside is checked in full: a value of another type than annotated is refused. Fields with a default may be
missing, and unknown names are skipped, so that versions may differ a little.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

_T = TypeVar("_T")
_MOST = 2**64
"""Largest absolute whole number: words of a progress board have 64 bits."""
LATEST_NS = 2**60
"""36 years after boot; with the offset to the wall clock still an int64."""

_Doubts = list[str] | None
_Read = Callable[[Any, _Doubts], Any]
_Write = Callable[[Any, bool], Any]


@dataclass(frozen=True)
class Between:
    """For ``Annotated``: bounds of a number, and its unit or meaning ("s", "a process id")."""

    least: float
    most: float
    what: str = ""


class Form(NamedTuple):
    """For ``Annotated``: how to read (raises ``ProtocolError``) and write a value beyond what its type says.

    ``what``: form in JSON, for the docs.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    what: str = ""


# -- types of fields, with bounds and units: a peer or a file may hold anything -----------------------------------


_LARGEST = 2**62
Count = Annotated[int, Between(0, _LARGEST, "count")]
Rank = Annotated[int, Between(0, 10**7, "global rank")]
WorldSize = Annotated[int, Between(0, 10**6, "ranks")]  # a report lists those whose logs are missing
LocalRank = Annotated[int, Between(0, 10**7, "local rank")]
Cycle = Annotated[int, Between(0, _LARGEST, "cycle")]
Pid = Annotated[int, Between(1, 2**22, "process id")]  # the kernel's largest
Moment = Annotated[int, Between(0, LATEST_NS, "ns, monotonic")]
Seconds = Annotated[float, Between(0, _LARGEST, "s")]


def _list(value: Any) -> list[int]:
    if type(value) is not list:
        raise ProtocolError(shown(value))
    return value


IntList = Annotated[list[int], Form(_list, lambda value: value, "list of whole numbers")]
"""List whose items are checked only when it becomes an array: a log has millions of them."""


# -- messages and records ---------------------------------------------------------------------------------------


class Vocabulary(Generic[_T]):
    """Message classes of one kind of peer or file, by name."""

    def __init__(self, kinds: Any, tag: str = "type") -> None:
        """``kinds``: the union of the classes, or a single class; ``tag``: the key of a message's name."""
        self.kinds: dict[str, Any] = {name_of(kind): kind for kind in typing.get_args(kinds) or (kinds,)}
        self._tag = tag

    def parse(self, message: Mapping[str, Any]) -> _T:
        """Return the message as an object of its class.

        Raises:
            ProtocolError: the name is unknown, or a field is invalid.
        """
        kind = self.kinds.get(str(message.get(self._tag)))
        if kind is None:
            raise ProtocolError(f"unknown {self._tag} {shown(message.get(self._tag))}")
        parsed: _T = _reader(kind)(message, None)
        return parsed

    def salvage(self, message: Mapping[str, Any], doubts: list[str]) -> _T | None:
        """Return the usable part of a message that may be damaged or of another version; None if there is none.

        An invalid field gets its default, an invalid item of a list or table is left out, and both are added to
        ``doubts``; so is a missing required field. An unknown name is no doubt.
        """
        kind = self.kinds.get(str(message.get(self._tag)))
        if kind is None:
            return None
        try:
            parsed: _T = _reader(kind)(message, doubts)
        except ProtocolError as error:
            doubts.append(str(error))
            return None
        return parsed


def pack(message: Any, tag: str = "type", *, full: bool = False) -> dict[str, Any]:
    """Return a message for JSON, without fields at their default unless ``full``."""
    kind: Any = type(message)
    return {tag: name_of(kind), **fields(message, full=full)}


def fields(value: Any, *, full: bool = False) -> dict[str, Any]:
    """Like ``pack``, without the name of the class; the reverse of ``unpack``."""
    kind: Any = type(value)
    found: dict[str, Any] = _object_writer(kind)(value, full)
    return found


def unpack(kind: Callable[..., _T], document: Any) -> _T:
    """Return an object of that class.

    Raises:
        ProtocolError: the document is malformed.
    """
    of: Any = kind
    found: _T = _reader(of)(document, None)
    return found


@functools.cache
def name_of(kind: Any) -> str:
    """Return the name in messages: RankExited -> "rank_exited", or the class's ``NAME``."""
    return kind.__dict__.get("NAME") or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower().rstrip("_")


@functools.cache
def _defaults(kind: Any) -> dict[str, Any]:
    def default(field: dataclasses.Field[Any]) -> Any:
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return field.default

    return {field.name: default(field) for field in dataclasses.fields(kind)}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


# -- reading ----------------------------------------------------------------------------------------------------


@functools.cache
def _reader(kind: Any) -> _Read:
    """Return the function that converts a JSON value to an annotation's type, or raises ``ProtocolError``."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _annotated_reader(*arguments)
    if origin in (typing.Union, types.UnionType):
        read = _reader(_not_none(arguments))
        return lambda value, doubts: None if value is None else read(value, doubts)
    if origin is tuple:
        return _list_reader(arguments[0]) if arguments[-1] is Ellipsis else _tuple_reader(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _table_reader(arguments[1])
    if kind is Mapping:
        return _exactly(dict)
    if dataclasses.is_dataclass(kind):
        return _object_reader(kind)
    if issubclass(kind, enum.Enum):
        return _enum_reader(kind)
    if hasattr(kind, "_fields"):  # a named tuple
        read = _tuple_reader(tuple(_hints(kind).values()))
        return lambda value, doubts: kind(*read(value, doubts))
    return _exactly(kind)


def _not_none(arguments: tuple[Any, ...]) -> Any:
    (inner,) = (each for each in arguments if each is not type(None))
    return inner


def _exactly(kind: type) -> _Read:
    def read(value: Any, _doubts: _Doubts) -> Any:
        if type(value) is not kind:
            raise ProtocolError(shown(value))
        return value

    return read


def _whole(value: Any, _doubts: _Doubts) -> int:
    if type(value) is not int or not -_MOST <= value <= _MOST:
        raise ProtocolError(shown(value))
    return value


def _number(value: Any, _doubts: _Doubts) -> float:
    if not ((type(value) is int and -_MOST <= value <= _MOST) or (type(value) is float and math.isfinite(value))):
        raise ProtocolError(shown(value))
    return float(value)


_PLAIN: dict[Any, _Read] = {int: _whole, float: _number, Any: lambda value, _doubts: value}


def _annotated_reader(kind: Any, *extras: Any) -> _Read:
    (extra,) = extras
    if isinstance(extra, Form):
        return lambda value, _doubts: extra.read(value)
    return _bounded(_reader(kind), extra)


def _bounded(inner: _Read, bounds: Between) -> _Read:
    def read(value: Any, doubts: _Doubts) -> Any:
        number = inner(value, doubts)
        if not bounds.least <= number <= bounds.most:
            raise ProtocolError(shown(value))
        return number

    return read


def _enum_reader(kind: type[enum.Enum]) -> _Read:
    members = {member.value: member for member in kind}

    def read(value: Any, _doubts: _Doubts) -> Any:
        if not isinstance(value, str | int) or value not in members:
            raise ProtocolError(shown(value))
        return members[value]

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> _Read:
    readers = [_reader(each) for each in arguments]

    def read(value: Any, doubts: _Doubts) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            raise ProtocolError(shown(value))
        return tuple(read(item, doubts) for read, item in zip(readers, value, strict=True))

    return read


def _list_reader(of: Any) -> _Read:
    read_item = _reader(of)

    def read(value: Any, doubts: _Doubts) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ProtocolError(shown(value))
        if doubts is None:
            return tuple(read_item(item, None) for item in value)
        found = _sound(read_item, enumerate(value), doubts)
        return tuple(item for _, item in found)

    return read


def _table_reader(of: Any) -> _Read:
    read_item = _reader(of)

    def read(value: Any, doubts: _Doubts) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ProtocolError(shown(value))
        if doubts is None:
            return {name: read_item(item, None) for name, item in value.items()}
        return dict(_sound(read_item, value.items(), doubts))

    return read


def _sound(read: _Read, items: Any, doubts: list[str]) -> list[tuple[Any, Any]]:
    """Return the readable items, each with its key."""
    found = []
    for key, item in items:
        try:
            found.append((key, read(item, doubts)))
        except ProtocolError as error:
            doubts.append(f"{shown(key)}: {error}")
    return found


def _object_reader(kind: Any) -> _Read:
    derived = {field.name for field in dataclasses.fields(kind) if not field.init}
    known = [(name, _reader(_hints(kind)[name])) for name in _defaults(kind) if name not in derived]
    needed = {name for name, default in _defaults(kind).items() if default is dataclasses.MISSING}
    title = name_of(kind)

    def read(value: Any, doubts: _Doubts) -> Any:
        if type(value) is not dict and not isinstance(value, Mapping):  # the check of an abstract class is slow
            raise ProtocolError(shown(value))
        found: dict[str, Any] = {}
        for name, read_field in known:
            if name not in value or (doubts is not None and value[name] is None):
                continue
            try:
                found[name] = read_field(value[name], doubts)
            except ProtocolError as error:
                text = f"{title} has {name} = {error}"
                if doubts is None:
                    raise ProtocolError(text) from None
                doubts.append(text)
        if len(found) < len(known) and not needed <= found.keys():
            raise ProtocolError(f"{title} has no {', '.join(sorted(needed - found.keys()))}")
        return kind(**found)

    return read


# -- writing ----------------------------------------------------------------------------------------------------


@functools.cache
def _writer(kind: Any) -> _Write | None:
    """Return the function that converts a value of an annotation's type for JSON; None if none is needed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        inner, extra = arguments
        return (lambda value, _full: extra.write(value)) if isinstance(extra, Form) else _writer(inner)
    if origin in (typing.Union, types.UnionType):
        return _optional_writer(_writer(_not_none(arguments)))
    if origin is tuple:
        return _list_writer(arguments[0]) if arguments[-1] is Ellipsis else _tuple_writer(arguments)
    if origin is not None and issubclass(origin, Mapping):
        write = _writer(arguments[1])
        return write and (lambda value, full: {name: write(item, full) for name, item in value.items()})
    if hasattr(kind, "__dataclass_fields__"):
        return _object_writer(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return lambda value, _full: value.value
    return _tuple_writer(tuple(_hints(kind).values())) if hasattr(kind, "_fields") else None


def _optional_writer(write: _Write | None) -> _Write | None:
    return write and (lambda value, full: None if value is None else write(value, full))


def _list_writer(of: Any) -> _Write | None:
    write = _writer(of)
    return write and (lambda value, full: [write(item, full) for item in value])


def _tuple_writer(of: tuple[Any, ...]) -> _Write | None:
    writers = [_writer(each) for each in of]
    if not any(writers):
        return None
    return lambda value, full: [
        write(item, full) if write else item for write, item in zip(writers, value, strict=True)
    ]


@functools.cache
def _object_writer(kind: Any) -> _Write:
    known = [(name, default, _writer(_hints(kind)[name])) for name, default in _defaults(kind).items()]

    def write(value: Any, full: bool) -> dict[str, Any]:
        found = {}
        for name, default, write_field in known:
            item = getattr(value, name)
            if full or (item is not default and item != default):
                found[name] = write_field(item, full) if write_field else item
        return found

    return write
