"""What only a GPU shows: ranks under NCCL, state on the device in memory checkpoints, kernels that never end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.link.linux import nvml
from megatron_ft.memory.rank import copying, restoring, saving
from megatron_ft.memory.rank.keeper_connection import Place
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base.agreement import RankInfo
from tests import ROOT
from tests.support.extras import skip_module_without
from tests.support.launching import Finished, Launched, Launcher

skip_module_without("xxhash")
torch = pytest.importorskip("torch")

from tests.memory.flips import DIGEST  # noqa: E402 - needs xxhash
from tests.support.keepers import RealKeeper  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

KILLED_AT = 6
TRAIN = """
import hashlib, torch
from megatron_ft import memory_checkpoint
torch.manual_seed(1)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.use_deterministic_algorithms(True)
torch.distributed.init_process_group("nccl")
width = 2048
first, last = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.1), last).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, OPTIMIZER)
def state_after(iteration):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cuda": torch.cuda.get_rng_state(),
            "strided": model[0].weight.t(), "iteration": iteration}
def train_until(state):
    for iteration in range(state["iteration"], 10):
        if CYCLE == 0 and iteration == KILLED_AT:
            memory_checkpoint.wait()
            fail()
        loss = model(torch.randn(256, width, device=device)).square().mean()
        torch.distributed.all_reduce(loss)
        optimizer.zero_grad()
        loss.backward()
        memory_checkpoint.wait()  # while the device computes: no snapshot is skipped
        optimizer.step()
        memory_checkpoint.save(iteration + 1, state_after(iteration + 1))
def fail():
    FAIL
state = state_after(0)
if memory_checkpoint.restore(state) is not None:
    optimizer.load_state_dict(state["optimizer"])
    torch.cuda.set_rng_state(state["cuda"])
say("begins cycle", CYCLE, "at", state["iteration"])
train_until(state)
memory_checkpoint.wait()
parts = [each.cpu().numpy().tobytes() for each in model.state_dict().values()]
parts += [each["exp_avg_sq"].cpu().numpy().tobytes() for each in optimizer.state.values()]
say("ends with", hashlib.sha256(b"".join(parts)).hexdigest())
"""
ONE = ("--standalone", "--nproc-per-node", "1", "--max-restarts", "2")
ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def ended(launched: Launched) -> Finished:
    finished = launched.wait(200)
    launched.assert_nothing_left()
    return finished


def run(launcher: Launcher, fail: str, *options: str, optimizer: str = "fused=True") -> Finished:
    script = TRAIN.replace("OPTIMIZER", optimizer).replace("FAIL", fail).replace("KILLED_AT", str(KILLED_AT))
    finished = ended(launcher.start(script, *ONE, *options, env=ENV))
    assert finished.code == 0, finished.err
    return finished


def end_of(finished: Finished) -> str:
    (digest,) = re.findall(r"^ends with (\w+)$", finished.out, re.MULTILINE)
    return str(digest)


@pytest.mark.parametrize("optimizer", ["fused=True", "foreach=True"])
def test_killed_rank_redoes_no_iteration_and_weights_are_those_of_an_undisturbed_run(
    fresh_launcher: Launcher, optimizer: str
) -> None:
    undisturbed = run(fresh_launcher, "pass", optimizer=optimizer)
    killed = run(fresh_launcher, "os.kill(os.getpid(), signal.SIGKILL)", optimizer=optimizer)
    assert f"begins cycle 1 at {KILLED_AT}" in killed.out
    assert f"restored iteration {KILLED_AT} from memory" in killed.err
    assert end_of(killed) == end_of(undisturbed)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def test_state_on_the_device_is_what_it_was_at_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that were queued before `save` are in the snapshot, those queued after it are not; bit by bit."""
    monkeypatch.setattr(copying, "LOCKED_BYTES", 64 << 20)  # several batches through page-locked memory
    large = torch.rand(60 << 20, device="cuda")
    state = {
        "large": large,
        "strided": torch.rand(1000, 1000, device="cuda").t(),
        "half": torch.rand(77, device="cuda").bfloat16(),
        "small": [torch.full((number % 9,), float(number), device="cuda") for number in range(3000)],
        "host": torch.rand(1 << 20),
        "empty": torch.empty(0, device="cuda"),
    }
    path = tmp_path / "k"
    keeper = RealKeeper(path, answers=True)
    place = Place(str(path), None, RankInfo(0, 0, "", 1), DIGEST)
    saver = saving.Saver(place)
    saver.save(1, state, 1)
    saver.wait()
    torch.cuda._sleep(1 << 30)  # what is queued now takes a while to come
    large.fill_(3.0)
    wanted = {name: bits(each) for name, each in state.items() if isinstance(each, torch.Tensor) and name != "large"}
    saver.save(2, state, 1)
    for each in (large, state["strided"], *state["small"]):
        each.fill_(7.0)
    saver.wait()
    assert saver.verified == SnapshotKey(0, 0, 2)
    target: dict[str | int, Any] = {"large": torch.zeros_like(large), "strided": torch.zeros_like(state["strided"])}
    restoring.restore(place, SnapshotKey(0, 0, 2), target)
    assert target["large"].is_cuda
    assert target["large"].eq(3.0).all()
    assert {name: bits(target[name]) for name in wanted} == wanted
    assert all(each.eq(float(number)).all() for number, each in enumerate(target["small"]))
    keeper.close()


def test_kernel_that_never_ends_is_noticed_and_its_rank_restarted(fresh_launcher: Launcher) -> None:
    hang = "torch.cuda._sleep(1 << 50); torch.cuda.synchronize()"
    script = TRAIN.replace("OPTIMIZER", "fused=True").replace("FAIL", hang).replace("KILLED_AT", str(KILLED_AT))
    script = script.replace(
        "state = state_after(0)\n",
        "from megatron_ft import RankMonitorClient\n"
        "client = RankMonitorClient()\nclient.init_workload_monitoring()\nstate = state_after(0)\n",
        1,
    ).replace("        loss = model", "        client.send_heartbeat()\n        loss = model", 1)
    timeouts = ("--ft-rank-heartbeat-timeout", "15", "--ft-initial-rank-heartbeat-timeout", "60")
    finished = ended(fresh_launcher.start(script, *ONE, *timeouts, env=ENV))
    assert finished.code == 0, finished.err
    assert f"begins cycle 1 at {KILLED_AT}" in finished.out
    assert "rank 0" in finished.err
    assert "hung" in finished.err or "no heartbeat" in finished.err


@pytest.mark.parametrize(("timing", "is_waiting"), [("1", "False"), ("0", "True")])
def test_enqueued_collective_is_waited_in_only_where_torch_does_not_see_its_start(
    tmp_path: Path, timing: str, is_waiting: str
) -> None:
    code = f"""
import time, torch, torch.distributed as dist
from megatron_ft.rank.crash_reporter.flight_recorder import counts
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://{tmp_path}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(8, device="cuda"))
torch.cuda.synchronize()
time.sleep(1)  # NCCL's watchdog looks every 100 ms
print(any(each.is_in_one for each in counts().values()))
torch.cuda._sleep(1 << 33)  # some seconds
dist.all_reduce(torch.ones(8, device="cuda"))
time.sleep(1)
print(any(each.is_in_one for each in counts().values()))
torch.cuda.synchronize()
"""
    env = {**os.environ, "TORCH_NCCL_ENABLE_TIMING": timing, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=120
    )
    assert done.stdout.split() == ["False", is_waiting]


def test_driver_names_the_device_and_a_process_that_holds_memory() -> None:
    torch.zeros(1 << 20, device="cuda")
    library = nvml.load()
    assert library is not None
    devices = nvml.memory_problems(library)
    assert devices is not None
    assert len(devices) == torch.cuda.device_count()
    assert nvml.holdings(library) is not None, sys.version
