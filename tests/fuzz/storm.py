"""Attacks on a listening socket, one connection after the other, hundreds of them open at once."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from megatron_ft.link.wire import encode
from tests.fuzz.hostile import Attack, Hostile

__all__ = ["ANSWER_S", "Counts", "exchange", "storm"]

ANSWER_S = 60.0
"""A peer that neither answers nor hangs up for so long hangs itself. It is waited for on loaded machines, too."""
_LEFT_OPEN = 300
_LOOK_EVERY = 500


class Counts(NamedTuple):
    """What was sent."""

    messages: int = 0
    connections: int = 0
    answered: int = 0
    """Connections on which something came back."""

    def __str__(self) -> str:
        return f"{self.messages} messages on {self.connections} connections, {self.answered} of them answered"


def storm(
    path: str, hostile: Hostile, messages: int, rng: random.Random, look: Callable[[], None] = lambda: None
) -> Counts:
    """Send that many messages to the socket at ``path``; ``look`` is called now and then, and may raise.

    Raises:
        TimeoutError: the peer doesn't accept, or neither answers nor hangs up.
    """
    counts = Counts()
    left: deque[socket.socket] = deque()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        while counts.messages < messages:
            attack = hostile.attack()
            sock = _connected(path)
            keep = _send(sock, attack, nothing)
            answered = False
            if keep and attack.ending == "read":
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                answered = _read_to_the_end(sock)
            if keep and attack.ending == "leave":
                left.append(sock)
            else:
                sock.close()
            if len(left) > _LEFT_OPEN:
                left[rng.randrange(len(left))].close()
                left.popleft().close()
            counts = Counts(counts.messages + attack.messages, counts.connections + 1, counts.answered + int(answered))
            if counts.connections % _LOOK_EVERY == 0:
                look()
    finally:
        os.close(nothing)
        for sock in left:
            sock.close()
    return counts


def exchange(path: str, message: dict[str, object]) -> bytes:
    """An honest question, and the raw answer to it.

    Raises:
        TimeoutError: none came.
        struct.error, ConnectionError: the peer hung up.
    """
    with _connected(path) as sock:
        sock.sendall(encode(message))
        head = sock.recv(4, socket.MSG_WAITALL)
        return sock.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_S)
    end = time.monotonic() + ANSWER_S
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:  # its queue is full
            if time.monotonic() > end:
                raise TimeoutError("nobody accepts") from None
            time.sleep(0.001)
        else:
            return sock


def _send(sock: socket.socket, attack: Attack, nothing: int) -> bool:
    """Write it; False if the peer has hung up meanwhile, as it may."""
    try:
        for number, piece in enumerate(attack.pieces):
            if number == 0 and attack.fds:
                socket.send_fds(sock, [piece], [nothing] * attack.fds)
            else:
                sock.sendall(piece)
    except TimeoutError:
        raise
    except OSError:
        return False
    return True


def _read_to_the_end(sock: socket.socket) -> bool:
    """Whether anything came before the peer hung up."""
    came = False
    try:
        while data := sock.recv(1 << 16):
            came = came or bool(data)
    except TimeoutError:
        raise
    except OSError:
        pass  # it hung up with something of ours unread
    return came
