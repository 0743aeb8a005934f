"""A job of two nodes whose processes are killed at random: every cycle begins where all ranks were, bit for bit.

python -m tests.memory.lives LIVES SEED
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.link.linux.processes import all_processes, carries
from tests.support.nodes import meeting_place

BOUND_S = 240.0
_BAD = "2 cycles that restored iteration"
KINDS = {"rank": 10, "both ranks": 3, "keeper": 3, "keeper and rank": 6, "node": 4, "job": 2}
STATE = """
import hashlib, json, os, sys, time, torch
torch.set_num_threads(1)
def fresh(rank):
    generator = torch.Generator().manual_seed(rank)
    return {"w": torch.rand(60_000, generator=generator), "many": [torch.full((3,), float(at)) for at in range(50)],
            "random": generator.get_state(), "iteration": 0}
def step(state):
    noise = torch.rand(60_000, generator=torch.Generator().set_state(state["random"]))
    state["random"] = torch.Generator().manual_seed(state["iteration"]).get_state()
    state["w"].mul_(0.9).add_(noise)
    torch._foreach_add_(state["many"], float(noise[0]))
    state["iteration"] += 1
def digest(state):
    tensors = (state["w"], state["random"], *state["many"])
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
"""
TRAIN = """
from pathlib import Path
from megatron_ft import memory_checkpoint
WHERE, LIFE = Path(sys.argv[1]), os.environ["LIVES_LIFE"]
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
state = fresh(RANK)
restored, out = memory_checkpoint.restore(state), open(WHERE / f"log.{RANK}", "a", buffering=1)
def tell(**more):
    told = {"life": int(LIFE), "cycle": CYCLE, "iteration": state["iteration"], "digest": digest(state), **more}
    out.write(json.dumps(told) + "\\n")
tell(restored=restored, pid=os.getpid())
while True:
    (WHERE / f"at.{LIFE}.{CYCLE}.{state['iteration']}.{RANK}").touch()  # as in a collective
    while not (WHERE / f"at.{LIFE}.{CYCLE}.{state['iteration']}.{1 - RANK}").exists():
        time.sleep(0.005)
    step(state)
    tell()
    memory_checkpoint.save(state["iteration"], state)
    time.sleep(0.05)
"""


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Job:
    """Two launchers on this machine, and what their ranks have told. What is wrong is a `RuntimeError`."""

    def __init__(self, where: Path) -> None:
        self.where, self.life, self.bad, self.begun, self.newest = where, 0, 0, dict[int, Any](), {0: 0, 1: 0}
        exec(STATE, undisturbed := dict[str, Any]())
        self._step, self._digest = undisturbed["step"], undisturbed["digest"]
        self._states = [undisturbed["fresh"](rank) for rank in (0, 1)]
        self._known = [[self._digest(state)] for state in self._states]
        self._logs = [open(where / f"log.{rank}", "w+") for rank in (0, 1)]  # noqa: SIM115 - until the end
        (where / "train.py").write_text(STATE + TRAIN)

    def start(self) -> None:
        self.life, self._place = self.life + 1, meeting_place("--nnodes=2", "--nproc-per-node=1")
        self.launchers = [self.start_node(node) for node in (0, 1)]

    def start_node(self, node: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "from megatron_ft.launcher.main import main; main()", *self._place]
        words += [f"--node-rank={node}", "--max-restarts=100000", "--ft-max-no-progress-cycles=0"]
        words += [f"--ft-memory-checkpoint-dir={self.where / 'files'}", str(self.where / "train.py"), str(self.where)]
        own = {"FT_SECRET": "5" * 32, "LIVES_LIFE": str(self.life), "LIVES_NODE": f"{self.where}:{node}"}
        with open(self.where / f"launcher.{node}", "ab") as log:
            return subprocess.Popen(words, env=os.environ | own, stdout=log, stderr=log)

    def kill(self, node: int, name: str = "") -> None:
        """Kill all processes of a node, or those of that name."""
        mark = f"LIVES_NODE={self.where}:{node}\0".encode()
        for each in list(all_processes()):
            if each.comm.startswith(name) and carries(each.pid, mark):
                end(each.pid)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait, and compare each state with that of an undisturbed run."""
        until_s = time.monotonic() + BOUND_S
        while not condition():
            if time.monotonic() > until_s or any(each.poll() is not None for each in self.launchers):
                raise RuntimeError(f"the job has stopped: {[each.poll() for each in self.launchers]}")
            time.sleep(0.02)
            for rank, line in [(at, line) for at, log in enumerate(self._logs) for line in log.readlines()]:
                row, known = json.loads(line), self._known[rank]
                while len(known) <= row["iteration"]:
                    self._step(self._states[rank])
                    known.append(self._digest(self._states[rank]))
                if row["digest"] != known[row["iteration"]]:
                    raise RuntimeError(f"rank {rank} has another state than an undisturbed one: {row}")
                self.newest[rank], self.begun[rank] = row["iteration"], row if "pid" in row else self.begun[rank]

    def wait_until_begun(self, *before: int) -> None:
        """Wait for a cycle after that one, by life and cycle. It goes on where all ranks were."""

        def of(word: str) -> set[Any]:
            return {each[word] for each in self.begun.values()}

        self.wait(lambda: len(of("life")) == len(of("cycle")) == 1 and (*of("life"), *of("cycle")) > before)
        # two kills in a row that come before a later snapshot is complete condemn one, as documented
        bad, self.bad = self.bad, (self.where / "launcher.0").read_text().count(_BAD)
        if len(of("restored")) > 1 or (None in of("restored") and self.bad == bad):
            raise RuntimeError(f"ranks begin at different iterations, or anew: {self.begun}")

    def end_something(self, chance: random.Random) -> str:
        """Let the job train a little, and kill something. Return what it was."""
        goal = max(each["iteration"] for each in self.begun.values()) + chance.choice([3, 5, 8, 13])
        self.wait(lambda: min(self.newest.values()) >= goal)
        kind, node = chance.choices(list(KINDS), list(KINDS.values()))[0], chance.randrange(2)
        before, pids = self.begun[0], [self.begun[rank]["pid"] for rank in (0, 1)]
        if "keeper" in kind:
            time.sleep(10)  # a keeper that is not given up, as five in a row are that live for less
            self.kill(node, "ft_keeper")
        for pid in pids if kind == "both ranks" else [pids[node]] if "rank" in kind else []:
            end(pid)
        if kind == "node":  # not the one with the endpoint, without which the job ends
            self.kill(1)
            self.launchers[1].wait()
            self.launchers[1] = self.start_node(1)
        if kind == "job":
            for act in (subprocess.Popen.terminate, subprocess.Popen.wait):
                for each in self.launchers:
                    act(each)
            self.start()
        if kind != "keeper":
            self.wait_until_begun(before["life"], before["cycle"])
        return kind


def main(lives: int, seed: int) -> None:
    chance, job = random.Random(seed), Job(Path(tempfile.mkdtemp()))
    print(job.where)
    try:
        job.start()
        job.wait(lambda: min(job.newest.values()) >= 10)  # snapshots are complete
        counts = Counter(job.end_something(chance) for _ in range(lives))
    finally:
        for node in (0, 1):
            job.kill(node)
    print(f"seed {seed}: {dict(counts)}, {job.bad} condemned snapshots")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
