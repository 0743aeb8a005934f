"""How often a launcher sends a sign of life to the coordinator, and after how much silence it is lost. Pure."""

from __future__ import annotations

__all__ = ["beat_s", "lost_s"]


def beat_s(nodes: int) -> float:
    """Seconds between two `Beat`s of a launcher, in a job of ``nodes`` nodes."""
    return min(5.0, max(1.0, nodes / 2000))


def lost_s(nodes: int) -> float:
    """Seconds of silence after which a launcher is lost; the kernel may notice an unreachable host sooner."""
    return 3 * beat_s(nodes) + 2.5
