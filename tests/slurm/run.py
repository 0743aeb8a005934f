"""One job on the cluster: its batch script, what is done to it, and what has become of it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tests.slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HOLD = 12
_QUICK = Path(__file__).with_name("job.py")
_OURS = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --requeue --no-kill --open-mode=append {sbatch}
exec megatron-ft slurm --spares {spares} --max-lives 6 -- \\
    --nproc-per-node 1 --max-restarts 3 {launcher} {script}
"""
_ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
_STARTED_S = 90.0
"""A life of the job is at its first hold by then, on a machine that does other things, too."""
_ENDED_S = 200.0


class Run:
    """Checkpoints, output and logs of a job are in a directory of its own; ``problems`` is what wasn't as expected."""

    def __init__(self, cluster: Cluster, directory: Path, weights: str) -> None:
        self.cluster, self.directory = cluster, directory
        self.save = directory / "checkpoints"
        self.save.mkdir(parents=True)
        self.problems: list[str] = []
        self.job = ""
        self.undisturbed = weights

    # -- start ------------------------------------------------------------------------------------------------

    def quick(self, *arguments: object) -> str:
        """The quick training, with its checkpoints in this run's directory."""
        return f"{_QUICK} --save {self.save} {' '.join(map(str, arguments))}"

    def submit(
        self, *arguments: object, nodes: int = 2, spares: int = 0, sbatch: str = "--exclusive", launcher: str = ""
    ) -> None:
        """The quick training, in a batch script as in docs/slurm.md."""
        words = {"sbatch": sbatch, "launcher": launcher, "script": self.quick(*arguments)}
        self.submit_script(_OURS.format(nodes=nodes, spares=spares, **words))

    def hold(self, *arguments: object, **more: Any) -> None:
        """Submit it, and wait until it waits at iteration `HOLD`."""
        self.submit("--hold", HOLD, *arguments, **more)
        self.wait_at(HOLD)

    def submit_script(self, text: str) -> None:
        batch = self.directory / "batch.sh"
        batch.write_text(text)
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        words = ["sbatch", "--parsable", f"--output={self.directory}/out.txt", f"--export=ALL,PATH={path}", str(batch)]
        self.job = self.cluster.command(*words, cwd=self.directory).strip()

    # -- meanwhile --------------------------------------------------------------------------------------------

    def wait_at(self, iteration: int) -> None:
        self.wait(lambda: (self.save / f"at-{iteration}").exists(), f"iteration {iteration} is reached")

    def go(self, iteration: int) -> None:
        """It needn't wait there any more."""
        (self.save / f"go-{iteration}").touch()

    def wait_told(self, pattern: str) -> None:
        self.wait(lambda: re.search(pattern, self.output, re.MULTILINE), f"{pattern!r} was told")

    def wait_life(self, number: int) -> None:
        self.wait(lambda: len(self.lives) >= number and self.lives[number - 1]["cycles"], f"life {number} trains")

    def wait(self, condition: Callable[[], object], what: str, bound_s: float = _STARTED_S) -> None:
        """Look again and again; a job that Slurm would start in two minutes is started at once."""

        def look() -> bool:
            self._hurry()
            has_ended = self.has_ended()
            if condition():
                return True
            if has_ended:
                raise TimeoutError(f"the job has ended before {what}")
            return False

        wait_for(look, bound_s, what)

    def finish(self, *outcomes: str, **expected: Any) -> None:
        """Let it go on from `HOLD` to its end, and compare."""
        self.go(HOLD)
        self.end()
        self.expect(*outcomes, **{"restarts": 0, **expected})

    def scancel(self, *options: str) -> None:
        self.cluster.command("scancel", *options, self.job)

    def end(self, bound_s: float = _ENDED_S) -> None:
        """Until it has ended for good."""
        self.wait(self.has_ended, "the job has ended", bound_s)
        wait_for(lambda: self.cluster.job(self.job).get("JobState") != "COMPLETING", 30, "it isn't completing")

    def has_ended(self) -> bool:
        return self.cluster.job(self.job).get("JobState") in _ENDED

    # -- what has become of it --------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        path = self.directory / "out.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def lives(self) -> list[dict[str, object]]:
        """As result.json has them."""
        found = sorted(self.directory.glob("ft-*/result.json"))
        return list(json.loads(found[0].read_text())["lives"]) if found else []

    @property
    def weights(self) -> str:
        """That it ended with; empty if it didn't train to its end."""
        path = self.save / "weights"
        return path.read_text().strip() if path.exists() else ""

    def host(self, rank: int) -> int:
        """The node that it is on, as far as it has said."""
        return int((self.save / f"rank-{rank}").read_text().removeprefix("node"))

    def expect(
        self,
        *outcomes: str,
        code: int | None = 0,
        state: str = "COMPLETED",
        faults: Sequence[tuple[str, str]] = (),
        told: Sequence[str] = (),
        weights: bool = True,
        restarts: int | None = None,
    ) -> None:
        """Compare; ``outcomes`` are those of the lives, ``restarts`` those of all lives.

        ``faults``: nodes that have ended a cycle, and how, as result.json has them.
        """
        job = self.cluster.job(self.job)
        seen = [str(life["outcome"]) for life in self.lives]
        if seen != list(outcomes):
            self.problems.append(f"lives: {' '.join(seen) or 'none'}, not {' '.join(outcomes)}")
        if job["JobState"] != state or (code is not None and job["ExitCode"] != f"{code}:0"):
            self.problems.append(f"{job['JobState']} {job['ExitCode']}, not {state} {code}:0")
        if weights and self.weights != (self.undisturbed or self.weights or None):
            self.problems.append(f"weights {self.weights[:12] or 'none'}, not {self.undisturbed[:12]}")
        used = sum(int(str(life["restarts"])) for life in self.lives)
        if restarts is not None and used != restarts:
            self.problems.append(f"{used} restarts, not {restarts}")
        blamed = [(fault["node"], fault["kind"]) for life in self.lives for fault in cast("Any", life["faults"])]
        self.problems += [f"no fault {fault} in {blamed}" for fault in faults if fault not in blamed]
        self.problems += [f"not told: {text}" for text in told if not re.search(text, self.output)]

    def clean_up(self) -> None:
        """Whatever has become of it, it isn't there any more."""
        self.cluster.command("scancel", "--user=root", check=False)
        self.cluster.command("scontrol", "update", "NodeName=ALL", "State=RESUME", check=False)
        self.cluster.boot_what_is_off()

    def _hurry(self) -> None:
        job = self.cluster.job(self.job)
        if (job.get("JobState"), job.get("Reason")) == ("PENDING", "BeginTime"):
            self.cluster.command("scontrol", "update", f"JobId={self.job}", "StartTime=now", check=False)
            time.sleep(0.5)
