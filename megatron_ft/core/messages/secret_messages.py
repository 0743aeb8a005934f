"""Messages by which both ends of a connection prove the job's secret; `ipc.net.secret` defines their order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megatron_ft.core.codec import Message, Vocabulary

_Hex = Annotated[str, Meta(pattern="^[ -~]*$")]
"""ASCII text: a lone surrogate, say, couldn't become bytes."""


class Ask(Message, frozen=True):
    """From a launcher with a secret: prove that you know it."""


class Open(Message, frozen=True):
    """From a coordinator that has no secret, to ``Ask``. ``over``: its job has ended; ``job``: the job's name."""

    over: bool
    job: str = ""


class Challenge(Message, frozen=True):
    """From a coordinator that has a secret, first of all: show that you know it. Otherwise like `Open`."""

    nonce: _Hex
    over: bool
    job: str = ""


class Proof(Message, frozen=True):
    """The launcher's answer to ``Challenge``: its proof, and ``nonce`` as its own challenge."""

    nonce: _Hex
    mac: _Hex


class Welcome(Message, frozen=True):
    """The coordinator's answer to ``Proof``: its own proof."""

    mac: _Hex


class Denied(Message, frozen=True):
    """From a coordinator, to anything else: the other end doesn't know the secret."""


Handshake = Ask | Open | Challenge | Proof | Welcome | Denied
HANDSHAKE: Vocabulary[Handshake] = Vocabulary(Handshake)
