"""Messages by which both ends of a connection prove the job's secret; `ipc.net.secret` defines their order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megatron_ft.core.codec import Message, Vocabulary

_Nonce = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
_Mac = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Ask(Message, frozen=True):
    """From a launcher with a secret: prove that you know it."""


class Open(Message, frozen=True):
    """From a coordinator that has no secret, to ``Ask``."""


class Challenge(Message, frozen=True):
    """From a coordinator that has a secret, first of all: show that you know it."""

    nonce: _Nonce


class Proof(Message, frozen=True):
    """The launcher's answer to ``Challenge``: its proof, and ``nonce`` as its own challenge."""

    nonce: _Nonce
    mac: _Mac


class Welcome(Message, frozen=True):
    """The coordinator's answer to ``Proof``: its own proof."""

    mac: _Mac


class Denied(Message, frozen=True):
    """From a coordinator, to anything else: the other end doesn't know the secret."""


Handshake = Ask | Open | Challenge | Proof | Welcome | Denied
HANDSHAKE: Vocabulary[Handshake] = Vocabulary(Handshake)
