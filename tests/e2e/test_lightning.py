"""The Lightning callbacks in real jobs: ``ft_launcher``, two ranks, ddp over gloo."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from tests.support.launching import ROOT, Finished, Launcher

pytestmark = pytest.mark.timeout(300)

JOB_S = 100.0
"""Bound for one job: two ranks that import Lightning at once, two or three times, on a loaded machine."""


def run(launcher: Launcher, command: list[str], *options: str, package: str = "lightning.pytorch") -> Finished:
    """Run a job to its end; nothing of it may be left."""
    env = {
        "FAULT_TOL_FINISHED_FLAG_FILE": str(launcher.directory / "finished"),
        "TORCHINDUCTOR_CACHE_DIR": str(launcher.directory / "inductor"),  # torch leaves it behind in TMPDIR
        "LIGHTNING_PACKAGE": package,
    }
    launched = launcher.start(command, *options, env=env)
    finished = launched.wait(JOB_S)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    return finished


@pytest.mark.parametrize(
    ("callback", "package", "timeouts", "state_file"),
    [
        (
            "sections",
            "lightning.pytorch",
            ("--ft-rank-section-timeouts=setup:90,step:8,checkpointing:90", "--ft-rank-out-of-section-timeout=90"),
            "_ft_state_.json",
        ),
        (
            "heartbeats",
            "pytorch_lightning",
            ("--ft-initial-rank-heartbeat-timeout=90", "--ft-rank-heartbeat-timeout=8"),
            "_ft_state.json",
        ),
    ],
)
def test_callback_notices_a_hang_resumes_learns_and_says_that_the_training_is_finished(
    launcher: Launcher, callback: str, package: str, timeouts: tuple[str, ...], state_file: str
) -> None:
    save = launcher.directory / "save"
    # rank 1 stops in the middle of a backward pass, after a save at 10
    job = {"callback": callback, "save": str(save), "max_steps": 30, "mishap": [1, 13]}
    script = [str(ROOT / "tests/support/lightning_job.py"), json.dumps(job)]
    finished = run(launcher, script, "--nproc-per-node=2", "--max-restarts=2", *timeouts, package=package)
    (launched,) = launcher.launches
    verdicts = launched.events("verdict", "monitor")
    (ended,) = [line for line in finished.lines if line.startswith("cycle 0 ended")]
    if callback == "sections":
        assert [(each["kind"], each["section"], each["rank"]) for each in verdicts] == [("section", "step", 1)]
        assert ended.startswith("cycle 0 ended: rank 1 hung in 'step' for 8.")
        # rank 0 waits for its gradients
        place = r"in lightning_job\.py:\d+ on_after_backward; rank 0 waits in \w+ #\d+; rest"
        assert re.search(f"after iteration 13, {place}", ended)
    else:  # the other rank waits for the one that hangs, and is as silent
        assert {(each["kind"], each["iteration"]) for each in verdicts} == {("heartbeat", 13)}
    firsts = [(event["cycle"], event["iteration"]) for event in launched.events("first_iteration", "monitor")]
    assert sorted(firsts) == [(0, 0), (0, 0), (1, 10), (1, 10)]
    assert finished.out.count("ended at step 30") == 2
    flag = launcher.directory / "finished"
    assert flag.read_text() == "the training is finished: max_steps=30 is reached\n"
    learned = json.loads((save / "ft" / state_file).read_text())["current_timeouts"]
    if callback == "sections":
        assert learned["section"]["calculated_sections"] == ["checkpointing", "setup", "step"]
        assert learned["section"]["is_out_of_section_calculated"]
    else:
        assert learned["heartbeat"]["were_calculated"]
        assert 0.0 < learned["heartbeat"]["subsequent"] < 90.0


def test_lightning_example_finishes_and_writes_flag_checkpoint_and_state(launcher: Launcher, tmp_path: Path) -> None:
    save = tmp_path / "save"
    example = [str(ROOT / "examples/lightning_gpt.py"), "--save", str(save), "--max-steps", "45"]
    configured = ("--fault-tol-cfg-path", str(ROOT / "megatron_ft/configs/megatron.yaml"))
    finished = run(launcher, example, "--nproc-per-node=1", *configured)
    assert "step 45: " in finished.out
    assert (tmp_path / "finished").exists()
    assert {"last.ckpt", "_ft_state_.json"} <= {path.name for path in save.iterdir()}
