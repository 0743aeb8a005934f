"""Messages by which both ends of a connection prove the job's secret; `ipc.net.secret` defines their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from megatron_ft.core.codec import Form, Vocabulary
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown


def _ascii(text: Any) -> str:
    if type(text) is not str or not text.isascii():
        raise ProtocolError(shown(text))
    return text


_Hex = Annotated[str, Form(_ascii, lambda text: text)]
"""ASCII text: a lone surrogate, say, couldn't become bytes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """From a launcher with a secret: prove that you know it."""


@dataclass(frozen=True, slots=True)
class Open:
    """From a coordinator that has no secret, to ``Ask``. ``over``: its job has ended; ``job``: the job's name."""

    over: bool
    job: str = ""


@dataclass(frozen=True, slots=True)
class Challenge:
    """From a coordinator that has a secret, first of all: show that you know it. Otherwise like `Open`."""

    nonce: _Hex
    over: bool
    job: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """The launcher's answer to ``Challenge``: its proof, and ``nonce`` as its own challenge."""

    nonce: _Hex
    mac: _Hex


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer to ``Proof``: its own proof."""

    mac: _Hex


@dataclass(frozen=True, slots=True)
class Denied:
    """From a coordinator, to anything else: the other end doesn't know the secret."""


Handshake = Ask | Open | Challenge | Proof | Welcome | Denied
HANDSHAKE: Vocabulary[Handshake] = Vocabulary(Handshake)
