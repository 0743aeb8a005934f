"""Sealed frames: the other end reads what was sent in that order, or refuses the stream with one reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Raw
from megatron_ft.link.secure_channel import SEAL_BYTES, Challenge, Handshake, Proof, SecretError, SecureChannel
from megatron_ft.link.wire import LENGTH_BYTES, Decoder, decode, encode

SECRET = b"s" * 16
MOST = 1000 + SEAL_BYTES
BODIES = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def ends(connects: bytes | None = SECRET, listens: bytes | None = SECRET) -> tuple[SecureChannel, SecureChannel]:
    """Channels of the end that connects and of the one that listens, after a handshake."""
    one, other = Handshake(connects, connects=True), Handshake(listens, connects=False)
    proofs = [one.answer(raw(other.first())), other.answer(raw(one.first()))]
    for end, proof in zip((other, one), proofs, strict=True):
        assert proof is not None
        assert end.answer(raw(proof)) is None
    assert one.channel is not None
    assert other.channel is not None
    return one.channel, other.channel


def raw(message: Challenge | Proof) -> Raw:
    return decode(encode(message)[LENGTH_BYTES:])


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
    return got, ""


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
    got, why = read(receives, changed + sends.seal(b"more") + b"more")
    assert b"more" not in got[len(bodies) :]
    assert "\n" not in why
    assert got == [*bodies, b"last"][: len(got)]


def test_a_frame_sent_back_to_its_sender_is_not_authentic() -> None:
    sends, _ = ends()
    got, why = read(sends, b"".join(frames(sends, [b"a"])))
    assert (got, why[:26]) == ([], "frame 0 isn't authentic: it"[:26])


def test_handshake_succeeds_only_with_the_same_secret_on_both_ends() -> None:
    ends(None, None)
    for secrets in ((SECRET, b"t" * 16), (SECRET, None), (None, SECRET)):
        with pytest.raises(SecretError):
            ends(*secrets)


def test_frames_are_worth_nothing_on_another_connection() -> None:
    (sends, _), (_, receives) = ends(), ends()
    assert "isn't authentic" in read(receives, sends.seal(b"a") + b"a")[1]


def test_a_proof_is_that_of_one_role_on_one_connection() -> None:
    one, other, stranger = Handshake(SECRET, connects=True), Handshake(SECRET, connects=False), Challenge("0" * 32)
    mine = one.answer(raw(other.first()))
    assert mine is not None
    elsewhere = Handshake(SECRET, connects=False).answer(raw(one.first()))
    for proof in (mine, elsewhere, Proof("0" * 64)):
        assert proof is not None
        with pytest.raises(SecretError):
            one.answer(raw(proof))
    for handshake, message in ((one, stranger), (other, mine)):  # a second challenge, or a proof before the first one
        with pytest.raises(ProtocolError, match="in a wrong place"):
            handshake.answer(raw(message))


def test_secret_and_key_are_not_shown_by_repr() -> None:
    sends, _ = ends()
    for each in (Handshake(SECRET, connects=True), sends):
        assert SECRET.decode() not in repr(each)
        assert not hasattr(each, "__dict__")
