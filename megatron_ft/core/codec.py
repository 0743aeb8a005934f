"""Messages and records as JSON, by msgspec: their base classes, types of their fields, and one place for errors. Pure.

Input from outside is checked in full. Fields with a default may be missing, and unknown names are skipped, so that
versions may differ a little.
"""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

_T = TypeVar("_T")
LATEST_NS = 2**60
"""36 years after boot; with the offset to the wall clock still an int64."""
_LARGEST = 2**62

# -- types of fields, with bounds and units: a peer or a file may hold anything -----------------------------------

_LARGEST_FLOAT = math.nextafter(math.inf, 0.0)
Finite = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=_LARGEST, description="count")]
Rank = Annotated[int, Meta(ge=0, le=10**7, description="global rank")]
WorldSize = Annotated[int, Meta(ge=0, le=10**6, description="ranks")]  # a report lists those whose logs are missing
LocalRank = Annotated[int, Meta(ge=0, le=10**7, description="local rank")]
Cycle = Annotated[int, Meta(ge=0, le=_LARGEST, description="cycle")]
Pid = Annotated[int, Meta(ge=1, le=2**22, description="process id")]  # the kernel's largest
Moment = Annotated[int, Meta(ge=0, le=LATEST_NS, description="ns, monotonic")]
Seconds = Annotated[float, Meta(ge=0, le=_LARGEST, description="s")]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what processes send each other: fields at their default aren't written."""


class Fact(msgspec.Struct, frozen=True):
    """Base of what stands in files and in the output of commands: written in full, for users' scripts."""


class Raw(NamedTuple):
    """A message or record that isn't decoded yet, and its name."""

    name: str
    body: bytes


class Vocabulary(Generic[_T]):
    """Message classes of one kind of peer or file, by name."""

    def __init__(self, kinds: Any) -> None:
        """``kinds``: the union of the classes, or a single class."""
        self.kinds: dict[str, Any] = {name_of(kind): kind for kind in typing.get_args(kinds) or (kinds,)}

    def parse(self, raw: Raw) -> _T:
        """Return the message as an object of its class.

        Raises:
            ProtocolError: the name is unknown, or a field is invalid.
        """
        kind = self.kinds.get(raw.name)
        if kind is None:
            raise ProtocolError(f"unknown message {shown(raw.name)}")
        parsed: _T = decode(kind, raw.body)
        return parsed

    def salvage(self, raw: Raw, doubts: list[str]) -> _T | None:
        """Return the usable part of a message that may be damaged or of another version; None if there is none.

        An invalid field gets its default, an invalid item of a list or table is left out, and both are added to
        ``doubts``; so is a missing required field. An unknown name is no doubt.
        """
        kind = self.kinds.get(raw.name)
        if kind is None:
            return None
        try:
            return _decoder(kind).decode(raw.body)  # type: ignore[no-any-return]
        except (UnicodeError, msgspec.DecodeError, RecursionError):
            pass
        try:
            text = json.dumps(_loads(raw.body.decode(errors="replace")), ensure_ascii=False)
            # a lone surrogate can't be printed
            return _usable(kind, _loads(text.encode(errors="replace")), doubts)  # type: ignore[no-any-return]
        except (ProtocolError, msgspec.ValidationError) as error:
            doubts.append(str(error))
            return None


@functools.cache
def name_of(kind: Any) -> str:
    """Return the name in messages: RankExited -> "rank_exited", or the class's ``NAME``."""
    return kind.__dict__.get("NAME") or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower().rstrip("_")


def encode(value: Any) -> bytes:
    """Return the JSON of a message, a record, or a container of them."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # a path or an argument that is no UTF-8: its bytes travel as lone surrogates
        return json.dumps(to_builtins(value), separators=(",", ":")).encode()


def encode_as(head: bytes, value: Any) -> bytes:
    """Return the JSON of a value, with more fields in front of its own: ``head`` is an object without its end."""
    fields = encode(value)[1:]
    return b"%b%b%b" % (head, b"" if fields == b"}" else b",", fields)


def decode(kind: Callable[..., _T], raw: bytes | str) -> _T:
    """Return an object of that class from its JSON.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _decoder(kind).decode(raw)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None
    except (UnicodeError, msgspec.DecodeError, RecursionError):
        return convert(kind, _loads(raw))


def convert(kind: Callable[..., _T], document: Any) -> _T:
    """Return an object of that class from an object of JSON or YAML.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return msgspec.convert(document, kind, dec_hook=_read_hooked)  # type: ignore[no-any-return]
    except (UnicodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None


def to_builtins(value: Any) -> Any:
    """Return a message or record as an object of JSON; the reverse of ``convert``."""
    return msgspec.to_builtins(value, enc_hook=_write_hooked)


def _read_hooked(kind: Any, value: Any) -> Any:
    return kind.from_json(value)


def _write_hooked(value: Any) -> Any:
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"no JSON for a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_write_hooked)


@functools.cache
def _decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind, dec_hook=_read_hooked)


def _loads(text: bytes | str) -> Any:
    """Read JSON by the standard library, which knows lone surrogates and NaN."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None


def _usable(kind: Any, value: Any, doubts: list[str]) -> Any:
    """Return the usable part of a value.

    Raises:
        ValidationError: there is none.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_read_hooked)
    except msgspec.ValidationError:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            (inner,) = (each for each in arguments if each is not type(None))
            return _usable(inner, value, doubts)
        if origin is tuple and arguments[-1] is Ellipsis and isinstance(value, list):
            return tuple(_usable_items(arguments[0], enumerate(value), doubts).values())
        if origin is Mapping and isinstance(value, dict):
            return _usable_items(arguments[1], value.items(), doubts)
        if isinstance(value, dict) and issubclass(origin or kind, msgspec.Struct):
            return _usable_fields(kind, value, doubts)
        raise


def _usable_items(of: Any, items: Any, doubts: list[str]) -> dict[Any, Any]:
    found = {}
    for key, item in items:
        try:
            found[key] = _usable(of, item, doubts)
        except msgspec.ValidationError:
            doubts.append(f"{shown(key)}: {shown(item)}")
    return found


def _usable_fields(kind: Any, value: dict[str, Any], doubts: list[str]) -> Any:
    found = {}
    fields = msgspec.structs.fields(kind)
    for field in fields:
        if (item := value.get(field.name)) is None:
            continue
        try:
            found[field.name] = _usable(field.type, item, doubts)
        except msgspec.ValidationError:
            doubts.append(f"{name_of(kind)} has {field.name} = {shown(item)}")
    if missing := [field.name for field in fields if field.required and field.name not in found]:
        raise msgspec.ValidationError(f"{name_of(kind)} has no {', '.join(missing)}")
    return kind(**found)
