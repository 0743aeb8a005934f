"""Whether an exception only tells that another rank is gone. Pure."""

from __future__ import annotations

__all__ = ["is_peer_loss"]

_LOST_A_PEER = (
    "closed by peer",
    "reset by peer",
    "connection was closed",
    "connection refused",
    "socket closed",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
    "watchdog caught collective operation timeout",
    "timed out",
    "timeout",
)
"""What gloo, NCCL and torch's store say, in lower case, when the other side of a collective is gone."""
_OF_A_COLLECTIVE = ("gloo", "nccl", "c10d", "tcpstore", "processgroup", "distbackenderror", "distnetworkerror")
"""Only with one of these is it theirs: a user's own connections break, too."""


def is_peer_loss(error: str) -> bool:
    """Whether an exception, "type: message", is what a collective raises when its other side is gone."""
    text = error.lower()
    return any(name in text for name in _OF_A_COLLECTIVE) and any(sign in text for sign in _LOST_A_PEER)
