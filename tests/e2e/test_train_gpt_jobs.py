"""`examples/train_gpt.py` under ft_launcher: its last checkpoint at SIGTERM, and the collectives that it issues."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.extras import skip_module_without
from tests.support.launching import ROOT, Finished, Launched, Launcher, launcher, wait_until

__all__ = ["launcher"]
IMPORTED_BEFORE = ("tests.support.megatron_on_cpu",)

skip_module_without("megatron", "psutil")  # without psutil megatron-core's saves hang for ever

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
HELD_IN_SAVES = str(ROOT / "tests" / "support" / "held_save.py")
SMALL = ("--hidden-size=32", "--seq-length=16", "--vocab-size=32", "--lr-decay-iters=100", "--log-interval=5")
ENDLESS = ("--train-iters=1000000", "--save-interval=1000000", "--eval-interval=0")
LAST = r"^  exiting at iteration (\d+)"


class Job:
    """Runs of two ranks with one save directory."""

    def __init__(self, launcher: Launcher, save: Path) -> None:
        self.launcher, self.save = launcher, save

    def start(self, *args: str, options: tuple[str, ...] = (), script: str = SCRIPT) -> Launched:
        environment = {"CUDA_VISIBLE_DEVICES": ""}  # two ranks may have but one GPU
        return self.launcher.start(
            [script],
            "--nproc-per-node=2",
            "--term-timeout=60",
            *options,
            script_args=("--save", str(self.save), *SMALL, *args),
            env=environment,
        )

    @property
    def last_iteration(self) -> int | None:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else None


def asked_to_end(launched: Launched) -> Finished:
    launched.signal(signal.SIGTERM)
    finished = launched.wait()
    for left in Path(launched.temp_dir).glob("pymp-*"):
        # of Python's multiprocessing in a rank that was killed: nobody else knows of it
        shutil.rmtree(left)
    launched.assert_nothing_left()
    return finished


def saved_at(finished: Finished) -> int:
    """All ranks ended with 0 after one agreed last checkpoint; its iteration."""
    assert finished.code == 0, finished.out + finished.err
    (iteration,) = re.findall(LAST, finished.out, re.MULTILINE)
    assert finished.out.count(f"saved checkpoint at iteration {int(iteration):7d} ") == 1
    assert finished.lines[-1] == "cycle 0 ended: stopped by SIGTERM, all ranks exited with 0; not restarting"
    return int(iteration)


@pytest.mark.timeout(300)
def test_sigterm_in_training_evaluation_or_a_save_leaves_a_last_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    job = Job(launcher, tmp_path / "checkpoints")
    training = job.start(*ENDLESS)
    training.wait_for(r"^ iteration +10/")
    first = saved_at(asked_to_end(training))
    assert job.last_iteration == first >= 10

    evaluating = job.start(*ENDLESS, "--eval-interval=1", "--eval-iters=1000000", "--log-interval=1")
    evaluating.wait_for(rf"^ iteration +{first + 1}/")
    finished = asked_to_end(evaluating)
    assert f"loaded checkpoint of iteration {first} " in finished.out
    assert f"leaving the evaluation at iteration {first + 1}\n" in finished.out
    assert saved_at(finished) == first + 1 == job.last_iteration

    saving = job.start(*ENDLESS, f"--save-interval={first + 3}", script=HELD_IN_SAVES)
    wait_until(lambda: (job.save / f"iter_{first + 3:07d}").exists() or saving.process.poll() is not None, 60)
    # the save that was under way is the last checkpoint
    assert saved_at(asked_to_end(saving)) == first + 3 == job.last_iteration

    last = job.start(f"--train-iters={first + 5}", "--eval-interval=0").wait()
    assert last.code == 0
    assert f"loaded checkpoint of iteration {first + 3} " in last.out
    assert job.last_iteration == first + 5


@pytest.mark.timeout(300)
def test_sigterm_in_setup_or_a_restart_saves_nothing_new(launcher: Launcher, tmp_path: Path) -> None:
    job = Job(launcher, tmp_path / "checkpoints")
    setting_up = job.start(*ENDLESS)
    setting_up.wait_for("cycle 0 started")
    finished = asked_to_end(setting_up)
    assert finished.code == 1  # the ranks died of it
    assert finished.seconds < 30
    assert "cycle 0 ended: stopped by SIGTERM, rank " in finished.lines[-1]
    assert job.last_iteration is None

    restarting = job.start(*ENDLESS, "--save-interval=5", options=("--max-restarts=3",))
    restarting.wait_for(r"^  saved checkpoint at iteration +5 ")
    (started,) = restarting.events("cycle_started")
    os.kill(started["ranks"][1]["pid"], signal.SIGKILL)
    restarting.wait_for("restarting as cycle 1")
    finished = asked_to_end(restarting)
    assert finished.code == 1
    assert "received SIGTERM" in finished.err
    assert not re.search(LAST, finished.out, re.MULTILINE)
    kept = job.last_iteration
    assert kept is not None

    # whichever rank hears of it, all save and end together
    one_hears = job.start(*ENDLESS)
    one_hears.wait_for(r"^ iteration +\d+/")
    (started,) = one_hears.events("cycle_started")
    os.kill(started["ranks"][1]["pid"], signal.SIGTERM)
    last = one_hears.wait()
    assert (last.code, last.lines[-1]) == (0, "all ranks finished after 1 cycle")
    assert f"loaded checkpoint of iteration {kept} " in last.out
    assert [str(job.last_iteration)] == re.findall(LAST, last.out, re.MULTILINE)


COUNTING = """
import json, runpy
sys.path.insert(0, {examples!r})
import torch.distributed as dist
destroy, counts = dist.destroy_process_group, {{}}

def numbers():
    groups = dist.distributed_c10d._world.pg_names
    return sorted(group._get_sequence_number_for_group() for group in list(groups))

def count_and_destroy(*arguments):
    with open({out!r} + str(RANK), "w") as file:
        json.dump(numbers(), file)
    destroy(*arguments)

dist.destroy_process_group = count_and_destroy
runpy.run_path({script!r}, run_name="__main__")
"""


def counts(launcher: Launcher, out: Path, *arguments: str) -> list[list[int]]:
    code = COUNTING.format(examples=str(ROOT / "examples"), out=str(out), script=SCRIPT)
    finished = launcher.run(
        code, "--nproc-per-node", "2", script_args=[*SMALL, "--train-iters=30", "--save-interval=10", *arguments]
    )
    assert finished.code == 0, finished.err
    return [json.loads(Path(f"{out}{rank}").read_text()) for rank in range(2)]


def test_learning_adds_no_collective_to_a_megatron_run(launcher: Launcher, tmp_path: Path) -> None:
    plain = counts(launcher, tmp_path / "plain", f"--save={tmp_path / 'a'}", "--no-ft")
    learning = counts(launcher, tmp_path / "learning", f"--save={tmp_path / 'b'}", "--calc-ft-timeouts")
    assert learning == plain
    assert all(sum(each) > 100 for each in plain)
    assert json.loads((tmp_path / "b" / "ft_state.json").read_text())["sections"].keys() >= {"step", "checkpointing"}
