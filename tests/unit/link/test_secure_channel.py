"""Sealed frames: the other end reads what was sent in that order, or refuses the stream with one reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ProtocolError
from megatron_ft.link.secure_channel import NONCE_BYTES, SEAL_BYTES, Role, SecureChannel, Session
from megatron_ft.link.wire import Decoder

SECRET, CONNECTS, LISTENS = b"s" * 16, b"c" * NONCE_BYTES, b"l" * NONCE_BYTES
MOST = 1000 + SEAL_BYTES
BODIES = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def session(
    *, secret: bytes = SECRET, purpose: str = "test", connects: bytes = CONNECTS, listens: bytes = LISTENS
) -> Session:
    return Session(secret, purpose, connects=connects, listens=listens)


def ends() -> tuple[SecureChannel, SecureChannel]:
    """Channels of the end that connects and of the one that listens."""
    return session().channel(Role.CONNECTS), session().channel(Role.LISTENS)


def frames(channel: SecureChannel, bodies: list[bytes]) -> list[bytes]:
    return [channel.seal(body) + body for body in bodies]


def read(channel: SecureChannel, data: bytes) -> tuple[list[bytes], str]:
    """Bodies that are read, and why no more are; empty if all is well at the end of the stream."""
    got: list[bytes] = []
    decoder = Decoder(MOST)
    try:
        for body in decoder.bodies(data):
            got.append(channel.open(body))
    except ProtocolError as error:
        return got, str(error)
    return got, "it ends within a frame" * bool(decoder.buffered_bytes)


@given(BODIES, st.data())
def test_every_change_of_the_stream_is_refused_after_an_unchanged_beginning(
    bodies: list[bytes], data: st.DataObject
) -> None:
    sends, receives = ends()
    sent = frames(sends, bodies)
    kind = data.draw(st.sampled_from(["flip", "drop", "repeat", "swap", "truncate", "insert"]))
    whole = b"".join(sent)
    at = data.draw(st.integers(0, len(sent) - 1))
    if kind == "flip":
        where = data.draw(st.integers(0, len(whole) - 1))
        changed = bytearray(whole)
        changed[where] ^= 1 << data.draw(st.integers(0, 7))
        changed = bytes(changed)
    elif kind == "drop":
        changed = b"".join(sent[:at] + sent[at + 1 :]) + sends.seal(b"later") + b"later"
    elif kind == "repeat":
        changed = b"".join([*sent[: at + 1], sent[data.draw(st.integers(0, at))], *sent[at + 1 :]])
    elif kind == "swap":
        sent += frames(sends, [b"last"])
        sent[at], sent[at + 1] = sent[at + 1], sent[at]
        changed = b"".join(sent)
    elif kind == "truncate":
        changed = whole[: -data.draw(st.integers(1, len(sent[-1]) - 1))]
    else:
        where = data.draw(st.integers(0, len(whole)))
        changed = whole[:where] + data.draw(st.binary(min_size=1, max_size=40)) + whole[where:]
        if changed == whole:
            return
    got, why = read(receives, changed)
    assert why
    assert "\n" not in why
    assert got == [*bodies, b"last"][: len(got)]


def test_a_frame_sent_back_to_its_sender_is_not_authentic() -> None:
    sends, _ = ends()
    got, why = read(sends, b"".join(frames(sends, [b"a"])))
    assert (got, why[:26]) == ([], "frame 0 isn't authentic: it"[:26])


@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"t" * 16},
        {"purpose": "other"},
        {"connects": b"x" * NONCE_BYTES},
        {"listens": b"x" * NONCE_BYTES},
        {"connects": LISTENS, "listens": CONNECTS},
    ],
)
def test_proofs_and_frames_are_worth_nothing_in_another_session(other: dict[str, bytes | str]) -> None:
    here, there = session(), session(**other)  # type: ignore[arg-type]
    for role in Role:
        assert not here.is_proof(there.proof(role), role)
    sends, receives = there.channel(Role.CONNECTS), here.channel(Role.LISTENS)
    assert "isn't authentic" in read(receives, sends.seal(b"a") + b"a")[1]


def test_a_proof_is_that_of_one_role() -> None:
    assert session().is_proof(session().proof(Role.LISTENS), Role.LISTENS)
    assert not session().is_proof(session().proof(Role.LISTENS), Role.CONNECTS)
    assert not session().is_proof(b"", Role.LISTENS)
    with pytest.raises(ProtocolError):
        session(connects=b"short")


def test_secret_and_key_are_not_shown_by_repr() -> None:
    sends, _ = ends()
    for each in (session(), sends):
        assert SECRET.decode() not in repr(each)
        assert not hasattr(each, "__dict__")
