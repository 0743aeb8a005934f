"""Messages and records as JSON, by msgspec: their base classes, types of their fields, and one place for errors. Pure.

Input from outside is checked in full. Fields with a default may be missing, and unknown names are skipped, so that
versions may differ a little. A float that isn't finite is written as null: none may get into a message.
"""

from __future__ import annotations

import functools
import json
import math
import re
import typing
from collections.abc import Callable, Iterator
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


class PartState(Message, frozen=True):
    """Base of what a part of the launcher and the same part of the leader tell each other within other messages."""


_State = TypeVar("_State", bound=PartState)


class Parts:
    """States of parts, one of each class, in a message that knows none of them by name. Never changed."""

    __slots__ = ("_states",)

    def __init__(self, *states: PartState) -> None:
        self._states = {type(state): state for state in states}

    def get(self, kind: type[_State]) -> _State | None:
        return self._states.get(kind)  # type: ignore[return-value]

    def updated(self, *states: PartState) -> Parts:
        return Parts(*self, *states) if states else self

    def __iter__(self) -> Iterator[PartState]:
        return iter(self._states.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and self._states == other._states

    def __hash__(self) -> int:
        return hash(frozenset(self))

    def __repr__(self) -> str:
        return f"Parts{tuple(self)}"

    @staticmethod
    def from_json(document: Any) -> Parts:
        """Skip parts that this process doesn't have."""
        if type(document) is not dict:
            raise ProtocolError(f"states of parts: {shown(document)}")
        kinds = {name_of(kind): kind for kind in PartState.__subclasses__()}
        return Parts(*(convert(kinds[name], value) for name, value in document.items() if name in kinds))


NO_PARTS = Parts()


class PartMessage(Message, frozen=True):
    """Base of messages between a part of the launcher and the same part of the leader. Those who carry them know no
    more."""

    def noted(self, parts: Parts, cycle: int) -> Parts:
        """Return what a launcher of this cycle tells the next leader now, from what it would have told before."""
        return parts


class Fact(msgspec.Struct, frozen=True):
    """Base of what stands in files and in the output of commands: written in full, for users' scripts."""


class Raw(NamedTuple):
    """A message or record that isn't decoded yet, and its name."""

    name: str
    body: bytes
    fd_count: int = 0
    """Number of descriptors that travel with a message."""


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

    def read(self, raw: Raw) -> _T | None:
        """Return a record of a file, None if its kind isn't known. What is no text becomes a question mark.

        Raises:
            ProtocolError: the record is damaged.
        """
        kind = self.kinds.get(raw.name)
        return None if kind is None else decode(kind, raw.body, as_text=True)


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


def decode(kind: Callable[..., _T], raw: bytes | str, *, as_text: bool = False) -> _T:
    """Return an object of that class from its JSON. Raise `ProtocolError` if it is none.

    ``as_text``: for people, and for files in UTF-8; a lone surrogate or another byte that is no text becomes "?".
    """
    try:
        return _decoder(kind).decode(raw)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None
    except (UnicodeError, msgspec.DecodeError, RecursionError):
        pass
    try:  # by the standard library, which knows lone surrogates and NaN
        document = json.loads(raw.decode(errors="replace") if as_text and isinstance(raw, bytes) else raw)
        if as_text:
            document = json.loads(json.dumps(document, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    return convert(kind, document)


def convert(kind: Callable[..., _T], document: Any) -> _T:
    """Return an object of that class from an object of JSON or YAML. Raise `ProtocolError` if it is none."""
    if type(document) is dict:  # msgspec can't skip an unknown name that is no UTF-8
        document = {name: document[name] for name in kind.__struct_fields__ if name in document}  # type: ignore[attr-defined]
    try:
        return _convert(document, kind)  # type: ignore[no-any-return]
    except (UnicodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{name_of(kind)}: {error}") from None


_read_hooked = lambda kind, value: kind.from_json(value)  # noqa: E731
_convert: Any = functools.partial(msgspec.convert, dec_hook=_read_hooked, str_keys=True)
_decoder: Any = functools.cache(functools.partial(msgspec.json.Decoder, dec_hook=_read_hooked))


def _write_hooked(value: Any) -> Any:
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if type(value) is Parts:
        return {name_of(type(state)): state for state in value}
    raise TypeError(f"no JSON for a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_write_hooked)
to_builtins: Callable[[Any], Any] = functools.partial(msgspec.to_builtins, enc_hook=_write_hooked)
"""Return a message or record as an object of JSON; the reverse of ``convert``."""
