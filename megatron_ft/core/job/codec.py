"""Frozen dataclasses to JSON objects and back, by their annotations: parsed once, at the edge. Pure.

What comes from outside is checked in full: a value of another type than the annotation says is refused. Fields that
have a default may be missing, and names that aren't known are passed over, so that versions may differ a little.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.job import messages

__all__ = ["parse", "read", "to_message"]

T = typing.TypeVar("T")

_TYPES: dict[str, type] = {
    kind.__name__.lower(): kind for kind in (*typing.get_args(messages.FromMember), *typing.get_args(messages.ToMember))
}


def to_message(message: Any) -> dict[str, Any]:
    """For the wire; fields at their default are left out."""
    return {"type": type(message).__name__.lower(), **_fields(message)}


def parse(message: Mapping[str, Any]) -> Any:
    """One of the classes of `messages`.

    Raises:
        ProtocolError: it is none of them, or one of its fields isn't what it has to be.
    """
    kind = _TYPES.get(str(message.get("type")))
    if kind is None:
        raise ProtocolError("a message of an unknown type")
    return _reader(kind)(message)


def read(kind: type[T], value: Any) -> T:
    """A JSON value as such a dataclass.

    Raises:
        ProtocolError: it isn't one.
    """
    reader: Callable[[Any], T] = _reader(typing.cast(Any, kind))
    return reader(value)


def _fields(value: Any) -> dict[str, Any]:
    found = {}
    kind: Any = type(value)
    for name, default in _defaults(kind):
        item = getattr(value, name)
        if item is not default and item != default:
            found[name] = _plain(item)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_plain(item) for item in value]
    return _fields(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    def default(field: dataclasses.Field[Any]) -> Any:
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return field.default

    return tuple((field.name, default(field)) for field in dataclasses.fields(kind))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What turns a JSON value into one of an annotation's type, or raises ``ProtocolError``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        read = _reader(inner)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is Mapping or kind is Mapping:
        return _exactly(dict)
    if dataclasses.is_dataclass(kind):
        return _object_reader(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_reader(kind)
    if isinstance(kind, type) and hasattr(kind, "_fields"):  # a named tuple
        read = _tuple_reader(tuple(typing.get_type_hints(kind).values()))
        return lambda value: kind(*read(value))
    if kind is float:
        return _number
    return _exactly(kind)


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"a {type(value).__name__} where a {kind.__name__} has to be")
        return value

    return read


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ProtocolError(f"a {type(value).__name__} where a number has to be")
    return float(value)


def _enum_reader(kind: type[enum.Enum]) -> Callable[[Any], Any]:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise ProtocolError(f"no {kind.__name__}")
        return members[value]

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    is_open = len(arguments) == 2 and arguments[1] is Ellipsis
    readers = [_reader(each) for each in arguments if each is not Ellipsis]

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not (is_open or len(value) == len(readers)):
            raise ProtocolError("no list of that length")
        return tuple(map(readers[0], value)) if is_open else tuple(r(v) for r, v in zip(readers, value, strict=True))

    return read


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    known = [(field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind)]
    needed = {name for name, default in _defaults(kind) if default is dataclasses.MISSING}

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"no {kind.__name__}")
        if not needed <= value.keys():
            raise ProtocolError(f"a {kind.__name__} without {', '.join(sorted(needed - value.keys()))}")
        return kind(**{name: reader(value[name]) for name, reader in known if name in value})

    return read
