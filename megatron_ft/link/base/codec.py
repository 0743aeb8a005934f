"""Messages and records as JSON, by msgspec: their base classes, types of their fields, and one place for errors. Pure.

Input from outside is checked in full. Fields with a default may be missing, and unknown names are skipped, so that
versions may differ a little. A float that isn't finite is written as null: none may get into a message.
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

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.wording import shown

_T = TypeVar("_T")
LATEST_NS = 2**60
"""36 years after boot; with the offset to the wall clock still an int64."""
_LARGEST, _LARGEST_FLOAT = 2**62, math.nextafter(math.inf, 0.0)
# types of fields, with bounds and units: a peer or a file may hold anything
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


class PartMessage(Message, frozen=True):
    """Base of messages between a part of the launcher and the same part of the leader. Those who carry them know no
    more."""


class Fact(msgspec.Struct, frozen=True):
    """Base of what stands in files and in the output of commands: written in full, for users' scripts."""


class Raw(NamedTuple):
    """A message or record that isn't decoded yet, and its name."""

    name: str
    body: bytes


class Vocabulary(Generic[_T]):
    """Message classes of one kind of peer or file, by name. ``kinds``: their union, or a single class."""

    def __init__(self, kinds: Any) -> None:
        self.kinds: dict[str, Any] = {name_of(kind): kind for kind in typing.get_args(kinds) or (kinds,)}

    def parse(self, raw: Raw) -> _T:
        """Return the message as an object of its class. Raise `ProtocolError` if it is none."""
        kind: Callable[..., _T] | None = self.kinds.get(raw.name)
        if kind is None:
            raise ProtocolError(f"unknown message {shown(raw.name)}")
        return decode(kind, raw.body)

    def salvage(self, raw: Raw, doubts: list[str]) -> _T | None:
        """Return the usable part of a message that may be damaged or of another version; None if there is none.

        An invalid field gets its default, an invalid item of a list or table is left out, and both are added to
        ``doubts``; so is a missing required field. An unknown name is no doubt.
        """
        kind = self.kinds.get(raw.name)
        if kind is None:
            return None
        try:
            try:
                found: _T = _decoder(kind).decode(raw.body)
            except _UNREADABLE:  # by msgspec, that is: for people, what is no text becomes a question mark
                text = json.dumps(_loads(raw.body.decode(errors="replace")), ensure_ascii=False)
                found = _usable(kind, _loads(text.encode(errors="replace")), doubts)
        except (ProtocolError, msgspec.ValidationError) as error:
            doubts.append(str(error))
            return None
        return found


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
    """Return an object of that class from its JSON. Raise `ProtocolError` if it is none."""
    try:
        return _decoder(kind).decode(raw)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None
    except _UNREADABLE:
        return convert(kind, _loads(raw))


def convert(kind: Callable[..., _T], document: Any) -> _T:
    """Return an object of that class from an object of JSON or YAML. Raise `ProtocolError` if it is none."""
    if type(document) is dict:  # msgspec can't skip an unknown name that is no UTF-8
        document = {name: document[name] for name in kind.__struct_fields__ if name in document}  # type: ignore[attr-defined]
    try:
        return _convert(document, kind)  # type: ignore[no-any-return]
    except (UnicodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None


_UNREADABLE = (UnicodeError, msgspec.DecodeError, RecursionError)
_read_hooked = lambda kind, value: kind.from_json(value)  # noqa: E731
_convert: Any = functools.partial(msgspec.convert, dec_hook=_read_hooked, str_keys=True)
_decoder: Any = functools.cache(functools.partial(msgspec.json.Decoder, dec_hook=_read_hooked))


def _write_hooked(value: Any) -> Any:
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"no JSON for a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_write_hooked)
to_builtins: Callable[[Any], Any] = functools.partial(msgspec.to_builtins, enc_hook=_write_hooked)
"""Return a message or record as an object of JSON; the reverse of ``convert``."""


def _loads(text: bytes | str) -> Any:
    """Read JSON by the standard library, which knows lone surrogates and NaN."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None


def _usable(kind: Any, value: Any, doubts: list[str]) -> Any:
    """Return the usable part of a value. Raise ``ValidationError`` if there is none."""
    try:
        return _convert(value, kind)
    except msgspec.ValidationError:
        origin, (of, *rest) = typing.get_origin(kind), typing.get_args(kind) or (kind,)
        if origin in (typing.Union, types.UnionType):  # with None, as a rule behind the other
            return _usable(rest[0] if of is type(None) else of, value, doubts)
        if origin is tuple and rest == [Ellipsis] and isinstance(value, list):
            return tuple(_sound("a list", [(at, of, item) for at, item in enumerate(value)], doubts).values())
        if origin is Mapping and isinstance(value, dict):
            return _sound("a table", [(key, rest[0], item) for key, item in value.items()], doubts)
        if not (isinstance(value, dict) and hasattr(kind, "__struct_fields__")):
            raise
    name, fields = name_of(kind), {each.name: each for each in msgspec.structs.fields(kind)}
    given = [(key, field.type, value[key]) for key, field in fields.items() if value.get(key) is not None]
    found = _sound(name, given, doubts)
    if missing := [key for key, field in fields.items() if field.required and key not in found]:
        raise msgspec.ValidationError(f"{name} has no {', '.join(missing)}")
    return kind(**found)


def _sound(where: str, items: list[tuple[Any, Any, Any]], doubts: list[str]) -> dict[Any, Any]:
    """Return the usable part of each item, by its key; ``items``: key, type and value."""
    found = {}
    for key, of, item in items:
        try:
            found[key] = _usable(of, item, doubts)
        except msgspec.ValidationError:
            doubts.append(f"{where} has {key} = {shown(item)}")
    return found
