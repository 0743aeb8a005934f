"""``make fuzz``: hostile input at full size to every socket, and to the boards.

python tests/fuzz/run.py --messages 1000000 --boards 100000 --seed 1
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from tests.fuzz.boards import fuzz_boards
from tests.fuzz.sockets import attack_coordinator, attack_launcher, attack_monitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000, help="to each socket")
    parser.add_argument("--boards", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="monitor,launcher,coordinator,boards")
    args = parser.parse_args()
    count, seed, began = args.messages, args.seed, time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    for part in args.only.split(","):
        say(f"-- {part}")
        with tempfile.TemporaryDirectory() as name:
            match part:
                case "monitor":
                    attack_monitor(Path(name), seed, say, hellos=count, questions=count)
                case "launcher":
                    attack_launcher(Path(name), seed, say, requests=count)
                case "coordinator":
                    attack_coordinator(seed, say, messages=count)
                case "boards":
                    fuzz_boards(seed, args.boards, say)
                case _:
                    parser.error(f"--only takes some of {parser.get_default('only')}")
    say("nothing crashed, nothing hung, no healthy rank was ended, and each hang at the end was found")


if __name__ == "__main__":
    main()
