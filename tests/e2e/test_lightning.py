"""The Lightning callbacks in real jobs: ``ft_launcher``, two ranks, ddp over gloo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from tests.support.launching import ROOT, Finished, Launched, Launcher

IMPORTED_BEFORE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "matplotlib.pyplot",
    "rich.console",
)  # Lightning does; it reads the rank itself
pytestmark = pytest.mark.timeout(300)

JOB_S = 100.0
"""Bound for one job: two ranks that import Lightning at once, two or three times, on a loaded machine."""


class Jobs:
    """One training: its directory, its flag, and its jobs one after the other."""

    def __init__(self, launcher: Launcher, directory: Path, *options: str) -> None:
        self.save = directory / "save"
        self.flag = directory / "finished"
        self._launcher = launcher
        self._options = options
        self.launched: list[Launched] = []

    def run(self, callback: str, package: str = "lightning.pytorch", **job: Any) -> Finished:
        """Run a job to its end; nothing of it may be left. The flag of an earlier one is removed before."""
        self.flag.unlink(missing_ok=True)
        description = json.dumps({"callback": callback, "save": str(self.save), **job})
        launched = self._launcher.start(
            [str(ROOT / "tests/support/lightning_job.py"), description],
            *("--nproc-per-node=2", "--max-restarts=2", *self._options),
            env={**environment(self.flag), "LIGHTNING_PACKAGE": package},
        )
        self.launched.append(launched)
        finished = launched.wait(JOB_S)
        launched.assert_nothing_left()
        return finished

    def learned(self, name: str) -> dict[str, Any]:
        """The file of learned timeouts."""
        document: dict[str, Any] = json.loads((self.save / "ft" / name).read_text())
        return document


def environment(flag: Path) -> dict[str, str]:
    """Of a job."""
    # the second, because torch leaves that directory behind in TMPDIR
    return {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag), "TORCHINDUCTOR_CACHE_DIR": str(flag.parent / "inductor")}


def iterations(launched: Launched) -> list[tuple[int, int]]:
    """(cycle, first iteration) of each rank, as the monitors saw it."""
    return sorted((event["cycle"], event["iteration"]) for event in launched.events("first_iteration", "monitor"))


def test_sections_notice_a_hang_and_learn(launcher: Launcher, tmp_path: Path) -> None:
    jobs = Jobs(
        launcher,
        tmp_path,
        "--ft-rank-section-timeouts=setup:90,step:8,checkpointing:90",
        "--ft-rank-out-of-section-timeout=90",
    )
    # rank 1 stops in the middle of a backward pass, after a save at 10
    first = jobs.run("sections", max_steps=30, mishap=["hang", 1, 13])
    assert first.code == 0, first.err
    (ended,) = [line for line in first.lines if line.startswith("cycle 0 ended")]
    assert ended.startswith("cycle 0 ended: rank 1 hung in 'step' for 8.")
    # rank 0 waits for its gradients
    assert re.search(
        r"after iteration 13, in lightning_job\.py:\d+ on_after_backward; rank 0 waits in \w+ #\d+; rest", ended
    )
    (verdict,) = jobs.launched[0].events("verdict", "monitor")
    assert (verdict["kind"], verdict["section"], verdict["rank"]) == ("section", "step", 1)
    assert iterations(jobs.launched[0]) == [(0, 0), (0, 0), (1, 10), (1, 10)]
    assert first.out.count("ended at step 30") == 2
    assert jobs.flag.read_text() == "the training is finished: max_steps=30 is reached\n"
    document = jobs.learned("_ft_state_.json")
    learned = document["current_timeouts"]["section"]
    assert learned["calculated_sections"] == ["checkpointing", "setup", "step"]
    assert learned["is_out_of_section_calculated"]

    # the next job has nothing to train, runs under what was learned, and says again that it is finished
    second = jobs.run("sections", max_steps=30)
    assert second.code == 0, second.err
    assert second.lines[-1] == "all ranks finished after 1 cycle"
    assert iterations(jobs.launched[1]) == []
    assert jobs.flag.exists()
    in_force = [event for event in jobs.launched[1].events("timeouts", "monitor") if event["sections"]["step"] != 8.0]
    assert in_force
    # what was learned ends no rank before its floor
    floor_s = {"setup": 240.0, "step": 60.0, "checkpointing": 60.0}
    expected = {name: max(floor_s[name], learned["section"][name]) for name in learned["calculated_sections"]}
    assert in_force[0]["sections"] == expected
    assert in_force[0]["out_of_section"] == max(60.0, learned["out_of_section"])
    assert jobs.launched[1].events("verdict", "monitor") == []


def test_heartbeats_callback_survives_max_time_and_a_hang(launcher: Launcher, tmp_path: Path) -> None:
    jobs = Jobs(launcher, tmp_path, "--ft-initial-rank-heartbeat-timeout=90", "--ft-rank-heartbeat-timeout=8")
    # the time is up long before the steps: that is no end of the training
    first = jobs.run("heartbeats", package="pytorch_lightning", max_steps=10**6, max_time_s=1.0, save_every=1)
    assert first.code == 0, first.err
    assert first.lines[-1] == "all ranks finished after 1 cycle", first.err
    assert "the training isn't finished" in first.err
    assert not jobs.flag.exists()
    assert not (jobs.save / "ft" / "_ft_state.json").exists()  # no checkpoint was loaded
    step = [int(line.split()[-1]) for line in first.out.splitlines() if "ended at step" in line][-1]
    assert step > 0

    # resumed without that limit: a hang, a restart, and the end
    second = jobs.run("heartbeats", package="pytorch_lightning", max_steps=step + 40, mishap=["hang", 0, step + 13])
    assert second.code == 0, second.err
    # the other rank waits for the one that hangs, and is as silent
    verdicts = jobs.launched[1].events("verdict", "monitor")
    assert {(verdict["kind"], verdict["iteration"]) for verdict in verdicts} == {("heartbeat", step + 13)}
    assert len([line for line in second.lines if "restarting as cycle 1" in line]) == 1
    assert f"step {step + 40}" in second.out
    assert jobs.flag.read_text() == f"the training is finished: max_steps={step + 40} is reached\n"
    learned = jobs.learned("_ft_state.json")["current_timeouts"]["heartbeat"]
    assert learned["were_calculated"]
    assert 0.0 < learned["subsequent"] < 90.0


def test_lightning_example_finishes_and_writes_flag_checkpoint_and_state(launcher: Launcher, tmp_path: Path) -> None:
    flag, save = tmp_path / "finished", tmp_path / "save"
    launched = launcher.start(
        [str(ROOT / "examples/lightning_gpt.py"), "--save", str(save), "--max-steps", "45"],
        *("--nproc-per-node=1", "--fault-tol-cfg-path", str(ROOT / "megatron_ft/configs/megatron.yaml")),
        env=environment(flag),
    )
    finished = launched.wait(JOB_S)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert "step 45: " in finished.out
    assert flag.exists()
    assert (save / "last.ckpt").exists()
    assert (save / "_ft_state_.json").exists()
