"""`examples/train_gpt.py`, unchanged, whose rank meets the faults of a chaos plan and notes what it has done.

Arguments: a directory of the campaign, then those of the example. The directory holds ``plan.json`` (a list of
events, each with the plan's seed), ``trace.jsonl`` (what happened, one line each, by all ranks) and ``orders`` (a
socket: the faults that a rank can't do to itself are done by the campaign while the rank waits).
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = "FT_CHAOS_LAUNCH"


class Rank:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rank, self._cycle = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
        self._launch = int(os.environ[LAUNCH])
        events = enumerate(json.loads((directory / "plan.json").read_text()))
        mine = {"rank": self._rank, "cycle": self._cycle, "launch": self._launch}
        self._events = {number: event for number, event in events if event.items() >= mine.items()}
        self._began = False
        self._full: list[int] = []
        self.iteration = -1

    def reach(self, phase: str, iteration: int = -1) -> None:
        """Meet what is planned for here."""
        for number, event in list(self._events.items()):
            if (event["phase"], event["iteration"]) == (phase, iteration):
                del self._events[number]
                self.note("fault", number=number)
                self._meet(number, event)

    def leave(self) -> None:
        """Its monitoring has ended, its process hasn't."""
        for number in self._full:
            self._order(number, "over")
        self.reach("exit")

    def step(self, iteration: int) -> None:
        self.iteration = iteration
        if not self._began:
            self._began = True
            self.note("began", iteration=iteration)
        self.reach("step", iteration)

    def note(self, what: str, **more: Any) -> None:
        """Write into the trace, in one piece."""
        told = {"t": time.monotonic_ns(), "what": what, "rank": self._rank, "cycle": self._cycle, **more}
        line = json.dumps({**told, "launch": self._launch}) + "\n"
        fd = os.open(self._directory / "trace.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)

    def _meet(self, number: int, event: Mapping[str, Any]) -> None:
        from tests.chaos.plan import FAULTS

        fault = event["fault"]
        if fault == "board":
            _spoil_boards(random.Random(f"{event['seed']}, {number}"))
        elif FAULTS[fault].by == "rank":
            from megatron_ft.rank.faults.injection import InjectedFault, inject
            from tests.verdicts import job as ways

            # Each in a way of its own: after two starts in a row that failed in the same way the launcher gives up.
            if fault == "rank_killed_soon":  # in the middle of a copy, of its commit, or of its verification
                after_s = random.Random(f"{event['seed']}, {number}").uniform(0.0, 0.06)
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                return
            if fault == "exception":
                raise InjectedFault(f"simulated fault {'abcdef'[number]}")
            sys.stdout.flush()
            sys.stderr.flush()
            if fault == "exit":
                os._exit(3 + number)
            getattr(ways, f"fault_{fault}", lambda: inject(fault))()
        else:
            if fault == "state_disk_full":
                self._full.append(number)
            self._order(number, "begin")

    def _order(self, number: int, what: str) -> None:
        """Have the campaign do it, and wait until it has."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
            orders.connect(str(self._directory / "orders"))
            orders.send(json.dumps({"number": number, "what": what, "pid": os.getpid()}).encode())
            orders.recv(64)


def _spoil_boards(chance: random.Random) -> None:
    from megatron_ft.link.board import Board

    # the watch of the collectives has closed its own board once the hooks had theirs
    boards = [each for each in gc.get_objects() if isinstance(each, Board) and not each._map.closed]
    assert boards, "there is a board to spoil"
    for board in boards:
        for index in range(len(board.words)):
            board.words[index] = chance.getrandbits(64)


def main() -> None:
    rank = Rank(Path(sys.argv[1]))
    rank.reach("start")
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(EXAMPLES / "train_gpt.py"), *sys.argv[2:]]
    import cpu_stand_in

    cpu_stand_in.install()
    import gpt_checkpoint
    import gpt_utils

    from megatron_ft import fault_tolerance as ft
    from megatron_ft import memory_checkpoint

    def before(module: Any, name: str, meet: Callable[..., None]) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            meet(*args, **kwargs)
            return function(*args, **kwargs)

        setattr(module, name, wrapped)

    def after(module: Any, name: str, meet: Callable[..., None]) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            returned = function(*args, **kwargs)
            meet(*args, **kwargs)
            return returned

        setattr(module, name, wrapped)

    after(ft, "setup", lambda *_: rank.reach("setup"))
    before(gpt_checkpoint, "load_checkpoint", lambda *_: rank.reach("load"))
    before(memory_checkpoint, "restore", lambda *_, **__: rank.reach("load"))
    before(memory_checkpoint, "save", lambda iteration, *_, **__: rank.reach("memory", iteration))
    after(ft, "on_training_step_start", lambda state: rank.step(state.train_state.step))
    after(ft, "on_eval_step_start", lambda _: rank.reach("evaluation", rank.iteration + 1))
    before(gpt_checkpoint, "save_checkpoint", lambda iteration, *_: rank.reach("save", iteration))
    before(
        gpt_checkpoint,
        "maybe_finalize_async_save",
        lambda *, blocking: rank.reach("finalization", rank.iteration + 1),
    )
    # all ranks have written; the rank that makes it final hasn't
    before(gpt_checkpoint, "_write_tracker", lambda _, iteration: rank.reach("written", iteration))
    after(gpt_checkpoint, "_write_tracker", lambda _, iteration: rank.note("saved", iteration=iteration))
    before(ft, "shutdown", lambda _: rank.reach("shutdown"))
    after(ft, "shutdown", lambda _: rank.leave())
    after(gpt_utils, "print_weights_hash", lambda *_: rank.note("finished"))
    runpy.run_path(sys.argv[0], run_name="__main__")


# the guard is needed: the campaign imports this, too
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
