"""`examples/train_gpt.py` without a launcher: a resumed run ends with the very bits of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.support.extras import skip_module_without
from tests.support.forked_script import ForkedScript, server_pids, start_server

skip_module_without("megatron", "psutil")  # without psutil megatron-core's saves hang for ever

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SHIPPED_PLAN = Path(__file__).parents[2] / "megatron_ft" / "configs" / "faults" / "kill-then-hang.yaml"  # for two ranks
HELD_IN_SAVES = Path(__file__).parents[1] / "support" / "held_save.py"
MARK = "TRAIN_GPT_TEST"
SMALL = ["--hidden-size=32", "--seq-length=16", "--vocab-size=32", "--train-iters=20", "--log-interval=10"]
LOG_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|.*lm loss: (\S+)")
DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(600)  # a run takes 5 s, on a machine that is busy with other tests twenty times that


@dataclass
class Finished:
    """A run whose ranks all ended with 0."""

    save: Path
    output: str

    @property
    def weights(self) -> str:
        """The hash of the final weights."""
        (found,) = re.findall(r"^final weights sha256: ([0-9a-f]{64})$", self.output, re.MULTILINE)
        return str(found)

    @property
    def last_iteration(self) -> int:
        return int((self.save / "latest_checkpointed_iteration.txt").read_text())

    @property
    def losses(self) -> dict[int, float]:
        """Of the iterations that were logged."""
        return {int(iteration): float(loss) for iteration, loss in LOG_LINE.findall(self.output)}


class Trainer:
    """Runs the script; what it starts carries a mark in its environment, to be found again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = uuid.uuid4().hex
        # no GPU, on a machine that has them, too: two ranks may have but one of them
        self.environment = {
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1",  # for `_show_stacks`
        }
        self._store: TCPStore | None = None

    def run(self, save: Path, *args: str, ranks: int = 2) -> Finished:
        """Train, and wait for the end."""
        processes, log = self.start(save, *args, ranks=ranks)
        codes = self._wait_for_all(processes)
        assert codes == [0] * ranks, log.read_text()
        return Finished(save=save, output=log.read_text())

    def start(self, save: Path, *args: str, ranks: int, script: Path = SCRIPT) -> tuple[list[ForkedScript], Path]:
        """Start the processes that torchrun would start, and name the file of their output.

        They are forks of one process that has imported Megatron; ``tests/e2e/test_demo.py`` has fresh interpreters.
        The store is ours, at a port that the kernel chose: no other test can be given the same.
        """
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **os.environ,
            **self.environment,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
        log = self.directory / f"{uuid.uuid4().hex}.log"
        words = ["--no-ft", "--save", str(save), *SMALL, *args]
        environments = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        return [ForkedScript(script, words, env, log) for env in environments], log

    def copy_of_10(self, straight: Finished) -> Path:
        """A save directory with the first checkpoint of another run as its last."""
        save = self.directory / uuid.uuid4().hex
        save.mkdir()
        shutil.copytree(straight.save / "iter_0000010", save / "iter_0000010")
        (save / "latest_checkpointed_iteration.txt").write_text("10\n")
        return save

    def resume_from_10(self, straight: Finished, *args: str, ranks: int = 2) -> Finished:
        """Go on from the first checkpoint of another run."""
        resumed = self.run(self.copy_of_10(straight), *args, ranks=ranks)
        assert "loaded checkpoint of iteration 10" in resumed.output
        assert resumed.last_iteration == (15 if "--exit-interval=15" in args else 20)
        return resumed

    def crash_in_the_save_of_20(self, save: Path, *args: str) -> None:
        """Kill a run of one rank in its first save."""
        processes, log = self.start(save, *args, ranks=1, script=HELD_IN_SAVES)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (save / "iter_0000020").exists():
                assert processes[0].poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
        finally:
            processes[0].kill()
            processes[0].wait()
            self.kill_leftovers()  # the save's helper process; under ft_launcher the launcher does this

    def leftovers(self) -> list[int]:
        """Processes of these runs that still live."""
        found = []
        wanted = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and int(entry.name) in server_pids():
                    continue
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # gone meanwhile, or not ours to look at
        return found

    def kill_leftovers(self) -> None:
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _show_stacks(self) -> None:
        """Have every process that lives, a save's helpers, too, write its stacks to its log; it ends of that."""
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        deadline = time.monotonic() + 20
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _wait_for_all(self, processes: list[ForkedScript]) -> list[int | None]:
        """Exit codes; when one fails or time is up, the others are killed."""
        deadline = time.monotonic() + DEADLINE_S
        try:
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if None not in codes or any(codes):
                    return codes
                time.sleep(0.01)
            codes = [process.poll() for process in processes]
            self._show_stacks()
            return codes
        finally:
            for process in processes:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("train_gpt"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in trainer.environment.items():
            patch.setenv(name, value)
        start_server()  # the mark of its forks is the one it was started with
    yield trainer
    deadline = time.monotonic() + 20
    while trainer.leftovers() and time.monotonic() < deadline:  # helpers of a rank end a moment after it
        time.sleep(0.05)
    left = trainer.leftovers()
    trainer.kill_leftovers()
    assert left == []


@pytest.fixture(scope="module")
def straight(trainer: Trainer) -> Finished:
    """Twenty iterations of two data-parallel ranks, with dropout, without a disturbance."""
    straight = trainer.run(trainer.directory / "straight", "--hash-file", str(trainer.directory / "hash"))
    assert (trainer.directory / "hash").read_text() == straight.weights + "\n"
    assert straight.last_iteration == 20
    assert "runs without CUDA; the CPU stands in for" in straight.output
    return straight


def test_loss_of_train_gpt_decreases(straight: Finished) -> None:
    assert straight.losses.keys() == {10, 20}
    assert straight.losses[20] < straight.losses[10] < 3.47  # ln(32), a model that knows nothing


def test_a_resumed_run_ends_with_the_same_weights(trainer: Trainer, straight: Finished) -> None:
    resumed = trainer.resume_from_10(straight)
    assert resumed.losses == {20: straight.losses[20]}
    assert resumed.weights == straight.weights


def test_run_resumed_from_an_asynchronous_save_has_the_same_weights(trainer: Trainer, straight: Finished) -> None:
    saved_behind = trainer.run(trainer.directory / "async", "--async-save")
    assert saved_behind.last_iteration == 20
    assert saved_behind.weights == straight.weights
    assert trainer.resume_from_10(saved_behind, "--async-save").weights == straight.weights


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_model_parallel_run_learns_and_resumes_with_the_same_weights(trainer: Trainer, kind: str) -> None:
    args = [f"--{kind}-model-parallel-size=2", "--eval-interval=7"]
    whole = trainer.run(trainer.directory / kind, *args)
    assert whole.losses[20] < whole.losses[10]
    assert trainer.resume_from_10(whole, *args).weights == whole.weights


@pytest.fixture(scope="module")
def one_rank(trainer: Trainer) -> Finished:
    """The cheapest whole run."""
    return trainer.run(trainer.directory / "bf16", "--bf16", ranks=1)


def test_bf16_run_resumes_with_the_same_weights_and_past_its_end_trains_nothing(
    trainer: Trainer, one_rank: Finished
) -> None:
    resumed = trainer.resume_from_10(one_rank, "--bf16", ranks=1)
    assert resumed.weights == one_rank.weights
    past_its_end = trainer.run(resumed.save, "--bf16", ranks=1)
    assert past_its_end.losses == {}
    assert past_its_end.weights == one_rank.weights


def test_run_resumed_without_random_states_has_other_weights(trainer: Trainer, one_rank: Finished) -> None:
    """Without them the weights are others: equal hashes do say something."""
    assert trainer.resume_from_10(one_rank, "--bf16", "--no-load-rng", ranks=1).weights != one_rank.weights


def test_a_crash_in_a_save_leaves_the_checkpoint_before_it(trainer: Trainer, one_rank: Finished) -> None:
    save = trainer.copy_of_10(one_rank)
    trainer.crash_in_the_save_of_20(save, "--bf16")
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "10\n"
    # What a later moment of a crash would have left, too.
    (save / "iter_0000020" / "__0_0.distcp").write_bytes(b"half a shard")
    (save / ".latest_checkpointed_iteration.txt.tmp").write_text("2")
    again = trainer.run(save, "--bf16", ranks=1)
    assert "loaded checkpoint of iteration 10" in again.output
    assert again.weights == one_rank.weights
    assert again.last_iteration == 20


def test_another_layout_drops_the_random_states_and_says_so(trainer: Trainer, straight: Finished) -> None:
    other = trainer.resume_from_10(straight, "--tensor-model-parallel-size=2", "--log-interval=5", "--exit-interval=15")
    assert "random states aren't restored" in other.output
    assert other.losses[15] < straight.losses[10]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--global-batch-size=7"], "--global-batch-size 7 must be a multiple of --micro-batch-size 2 times 1"),
        (["--pipeline-model-parallel-size=2"], "1 ranks can't be divided into groups of 1 (tensor) x 2 (pipeline)"),
        (["--enable-ft-package"], "--save is missing"),
        (["--train-iter=5"], "unrecognized arguments: --train-iter=5"),
        (["--no-ft", "--fault-plan=/no/plan.yaml"], "error: /no/plan.yaml"),
        (["--no-ft", f"--fault-plan={SHIPPED_PLAN}"], "below the number of ranks"),
    ],
)
def test_mistakes_get_one_line(args: list[str], message: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import gpt_arguments; gpt_arguments.parse_args()"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT.parent), *args], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert message in ended.stderr.splitlines()[-1]


STAND_IN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "cuda":
    torch.cuda.is_available = lambda: True
def state():
    import megatron.core.tensor_parallel.random as helpers
    spots = [torch.compile, torch.zeros, torch.ones, torch.empty, torch.tensor, torch.Tensor.cuda, torch.Tensor.type]
    spots += [getattr(torch.cuda, name) for name in "current_device synchronize get_rng_state manual_seed".split()]
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    queues = "get_write_results_queue", "_get_write_results_queue"
    spots += [getattr(filesystem_async, name) for name in queues if hasattr(filesystem_async, name)]
    return spots + [helpers._get_cuda_rng_state, helpers._set_cuda_rng_state, torch.cuda.set_rng_state]
before = state()
import cpu_stand_in
replaced = cpu_stand_in.install()
same = [a is b for a, b in zip(before, state())]
assert cpu_stand_in.install() == replaced  # a second call changes nothing
assert [a is b for a, b in zip(before, state())] == same
print(len(replaced), sum(same), len(same), flush=True)
"""


@pytest.mark.parametrize(("device", "expected"), [("cpu", "6 0 15"), ("cuda", "0 15 15")])
def test_the_stand_in_leaves_cuda_alone(trainer: Trainer, tmp_path: Path, device: str, expected: str) -> None:
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN)
    ForkedScript(script, [str(SCRIPT.parent), device], {**os.environ, **trainer.environment}, log).wait()
    assert log.read_text().split() == expected.split()
