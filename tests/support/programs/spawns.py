"""Starts processes in each way that multiprocessing has, with classes of its own."""

import dataclasses
import multiprocessing
import os
import sys


@dataclasses.dataclass(frozen=True)
class Item:
    number: int
    name: str = dataclasses.field(default_factory=lambda: os.environ["RANK"])


def double(item):
    return dataclasses.replace(item, number=2 * item.number), __name__


if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(double, [Item(1), Item(2)]))
    sys.exit(3)
