"""`examples/train_gpt.py` in jobs that are stopped: SIGTERM ends with a save."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.extras import skip_module_without
from tests.support.launching import ROOT, Finished, Launched, Launcher, wait_until

skip_module_without("megatron", "psutil")  # without psutil megatron-core's saves hang for ever

pytestmark = pytest.mark.timeout(600)  # a run takes 5 s, on a machine that is busy with other tests twenty times that
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
HELD_IN_SAVES = str(ROOT / "tests" / "support" / "held_save.py")
SMALL = ("--hidden-size=32", "--seq-length=16", "--vocab-size=32")
ENDLESS = ("--train-iters=1000000", "--save-interval=1000000", "--eval-interval=0", "--lr-decay-iters=100")
LAST = r"^  exiting at iteration (\d+)"


class Job:
    """Runs with one save directory."""

    def __init__(self, launcher: Launcher, save: Path) -> None:
        self.launcher, self.save = launcher, save

    def start(self, *args: str, options: tuple[str, ...] = (), script: str = SCRIPT) -> Launched:
        options = ("--nproc-per-node=2", "--term-timeout=60", *options)
        args = ("--save", str(self.save), *SMALL, *args)
        environment = {"CUDA_VISIBLE_DEVICES": ""}  # two ranks may have but one GPU
        return self.launcher.start([script], *options, script_args=args, env=environment)

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


def test_sigterm_in_training_evaluation_or_a_save_leaves_a_last_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    job = Job(launcher, tmp_path / "checkpoints")
    training = job.start(*ENDLESS)
    training.wait_for(r"^ iteration +10/")
    first = saved_at(asked_to_end(training))
    assert job.last_iteration == first >= 10

    saving = job.start(*ENDLESS, f"--save-interval={first + 3}", script=HELD_IN_SAVES)
    wait_until(lambda: (job.save / f"iter_{first + 3:07d}").exists() or saving.process.poll() is not None, 60)
    # the save that was under way is the last checkpoint
    finished = asked_to_end(saving)
    assert f"loaded checkpoint of iteration {first} " in finished.out
    assert saved_at(finished) == first + 3 == job.last_iteration

    evaluating = job.start(*ENDLESS, "--eval-interval=1", "--eval-iters=1000000", "--log-interval=1")
    evaluating.wait_for(rf"^ iteration +{first + 4}/")
    finished = asked_to_end(evaluating)
    assert f"loaded checkpoint of iteration {first + 3} " in finished.out
    assert f"leaving the evaluation at iteration {first + 4}\n" in finished.out
    assert saved_at(finished) == first + 4 == job.last_iteration
