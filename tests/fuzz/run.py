"""Fuzzing at full size: every socket, and the boards.

    python tests/fuzz/run.py --messages 1000000 --boards 100000 --seed 1

`--only monitor,launcher,coordinator,boards` runs some of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.boards import fuzz_boards
from tests.fuzz.sealed import attack_coordinator
from tests.fuzz.sockets import attack_launcher, attack_monitor

_PARTS = ("monitor", "launcher", "coordinator", "boards")
_LESS = 10
"""The monitor of a launcher is the same program as the one by itself: it gets a tenth."""


def main() -> None:
    """Read the command line, and run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000, help="to each socket")
    parser.add_argument("--boards", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default=",".join(_PARTS))
    args = parser.parse_args()
    wanted = args.only.split(",")
    if not set(wanted) <= set(_PARTS):
        parser.error(f"--only takes some of {', '.join(_PARTS)}")
    count, seed, began = args.messages, args.seed, time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part in wanted:
            say(f"-- {part}")
            (directory / part).mkdir()
            if part == "monitor":
                attack_monitor(directory / part, seed, say, hellos=count, orders=count, questions=count)
            elif part == "launcher":
                attack_launcher(directory / part, seed, say, requests=count, hellos=count // _LESS)
            elif part == "coordinator":
                attack_coordinator(seed, say, messages=count)
            else:
                fuzz_boards(seed, args.boards, say)
    say("nothing crashed, nothing hung, no healthy rank was ended, and each hang at the end was found")


if __name__ == "__main__":
    main()
