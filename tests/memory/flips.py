"""Plant bit flips in segments, and see that each is found.

Each flip is found twice: by the keeper, which verifies a segment that was written or adopted, and by the rank that
restores it. A sealed segment can't be changed, so it is changed before. Those on the way from one keeper to another are
found by the one or the other.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from megatron_ft.errors import SnapshotError
from megatron_ft.memory.base import digests, segment
from megatron_ft.memory.keeper import work
from megatron_ft.memory.rank.keeper_connection import Place
from megatron_ft.memory.rank.restoring import fill_from
from megatron_ft.memory.rules.segment_layout import TRAILER_BYTES, encode_head, encode_rows
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base.agreement import RankInfo
from tests.memory.in_flight import Peer, Way, between

_MADE = digests.installed()
assert _MADE is not None, "xxhash isn't installed"
DIGEST = _MADE
KEY = SnapshotKey(1, 0, 1207)
PLACE = Place("", None, RankInfo(0, 0, "", 0), DIGEST)
PLACES = ("tensor", "layout", "trailer")
_LANES = 32


def filled(
    content: Mapping[str, bytes],
    flip: tuple[str, random.Random] | None = None,
    *,
    key: SnapshotKey = KEY,
    world: int = 1,
) -> int:
    """The descriptor of a segment with these tensors of bytes, not sealed; ``flip``: one bit, in that part of it."""
    fd, found, end = segment.create(), [], 0
    for data in content.values():
        found.append(DIGEST([data]))
        segment.write(fd, memoryview(data), end)
        end += len(data)
    rows = encode_rows(("uint8", (len(data),)) for data in content.values())
    tree = {name: ["tensor", at] for at, name in enumerate(content)}
    head = encode_head(key, 0, world, rows, {**tree, "iteration": 1207})
    size = segment.write_end(fd, head, found, end, DIGEST)
    if flip is not None:
        place, draw = flip
        start, stop = {
            "tensor": (0, end),
            "layout": (end, size - TRAILER_BYTES),
            "trailer": (size - TRAILER_BYTES, size),
        }[place]
        at, bit = draw.randrange(start, stop), draw.randrange(8)
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << bit]), at)
    return fd


def plant(runs: int, seed: int) -> Counter[str]:
    """Plant so many flips; the number of those that were found, and of those that were missed, by place."""
    import torch

    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for run in range(runs):
        place = PLACES[run % len(PLACES)]
        content = {f"t{at}": draw.randbytes(draw.randrange(1, 4096)) for at in range(draw.randrange(1, 6))}
        fd = filled(content, (place, draw))
        segment.seal(fd, os.fstat(fd).st_size)
        state = {name: torch.zeros(len(data), dtype=torch.uint8) for name, data in content.items()}
        is_found = isinstance(work.check(fd, DIGEST), str)
        try:
            fill_from(os.dup(fd), PLACE, KEY, state)
            is_refused = False
        except SnapshotError:
            is_refused = True
        os.close(fd)
        counts[f"{place} found" if is_found and is_refused else f"{place} MISSED"] += 1
    return counts


def plant_in_flight(runs: int, seed: int) -> Counter[str]:
    """Plant so many flips in copies on their way; the number of those found and missed, by direction.

    They hit nonces, proofs, messages, seals and pieces, in both directions of the connection. After one in a length the
    other end waits for seconds: many are planted at a time.
    """
    shares = [range(lane, runs, _LANES) for lane in range(_LANES)]
    with ThreadPoolExecutor(_LANES) as pool:
        return sum(pool.map(lambda share: _plant_in_flight(share, random.Random(f"{seed} {share}")), shares), Counter())


def _plant_in_flight(runs: range, draw: random.Random) -> Counter[str]:
    counts: Counter[str] = Counter()
    peer = Peer(b"")
    for run in runs:
        peer.loop.content = draw.randbytes(draw.randrange(1, 4096))
        is_fetched = bool(run % 2)
        with between(peer) as way:
            assert _copied(peer, way, is_fetched=is_fetched) == ""
            length = way.passed
        with between(peer, change_at=draw.randrange(length), bit=draw.randrange(8)) as way:
            why = _copied(peer, way, is_fetched=is_fetched)
        # an acknowledgement that has changed comes after a copy that is whole
        is_found = bool(why) and not any(each.is_changed for each in peer.loop.copies)
        counts[f"{'fetched' if is_fetched else 'sent'} {'found' if is_found else 'MISSED'}"] += 1
    return counts


def _copied(peer: Peer, way: Way, *, is_fetched: bool) -> str:
    """Copy over that way; return why that failed."""
    return peer.fetch(address=way.address)[1] if is_fetched else peer.send(address=way.address)
