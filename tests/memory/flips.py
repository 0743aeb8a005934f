"""Plant bit flips in segments, and see that each is found before a tensor is used: `python tests/memory/flips.py`.

Each flip is found twice: by the keeper, which verifies a segment that was written or adopted, and by the rank that
restores it, whose own tensors must be untouched then. A sealed segment can't be changed, so it is changed before.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.segment_layout import Layout, TensorAt, TensorEntry, encode
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.ipc.memory import digests, segment
from megatron_ft.keeper import work
from megatron_ft.rank.memory.restoring import fill_from

_MADE = digests.installed()
assert _MADE is not None, "xxhash isn't installed"
HASHER = _MADE
KEY = SnapshotKey(1, 1207)
PLACES = ("tensor", "layout", "trailer")


def filled(
    content: Mapping[str, bytes], flip: tuple[str, random.Random] | None = None, *, key: SnapshotKey = KEY
) -> int:
    """The descriptor of a segment with these tensors of bytes, not sealed; ``flip``: one bit, in that part of it."""
    fd, entries, end = segment.create(), [], 0
    for name, data in content.items():
        hasher = HASHER()
        hasher.update(data)
        entries.append(TensorEntry((name,), "uint8", (len(data),), end, len(data), hasher.hexdigest()))
        segment.write(fd, memoryview(data), end)
        end += len(data)
    values = {name: TensorAt(at) for at, name in enumerate(content)}
    layout = encode(Layout(key, 0, 1, tuple(entries), {**values, "iteration": 1207}))
    size = segment.write_end(fd, layout, end, HASHER)
    if flip is not None:
        place, draw = flip
        start, stop = {
            "tensor": (0, end),
            "layout": (end, end + len(layout)),
            "trailer": (end + len(layout), size),
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
        is_found = isinstance(work.check(fd, HASHER), str)
        try:
            fill_from(fd, KEY, 0, 1, state, HASHER)
            is_refused = False
        except SnapshotError:
            is_refused = not any(tensor.any() for tensor in state.values())
        os.close(fd)
        counts[f"{place} found" if is_found and is_refused else f"{place} MISSED"] += 1
    return counts


def main() -> int:
    """Run the campaign; the exit code: 1 if a flip was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    counts = plant(options.runs, options.seed)
    print(f"seed {options.seed}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return 1 if any("MISSED" in what for what in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
