"""Device memory of a process, as the driver tells of it. Pure."""

from __future__ import annotations

from megatron_ft.link.base.codec import Fact, Int


class Holding(Fact, frozen=True):
    """Memory of one process on one device; ``used_bytes`` is None where the driver doesn't say."""

    device: Int
    pid: Int
    used_bytes: Int | None = None
