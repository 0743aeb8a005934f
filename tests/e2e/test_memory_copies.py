"""Copies of memory checkpoints on another node: a lost node's ranks go on from there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.support.extras import skip_module_without
from tests.support.launching import Finished, Launched, Launcher
from tests.support.netns import Hosts
from tests.support.nodes import wait_for_all

skip_module_without("xxhash")

IMPORTED_BEFORE = ()  # torch is enough

pytestmark = pytest.mark.timeout(300)

SECRET = "0123456789abcdef0123456789abcdef"
ITERATIONS, LOST_AT = 12, 6
SCRIPT = f"""
import hashlib, pathlib, torch
from megatron_ft import memory_checkpoint
WHERE, WORLD = pathlib.Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.manual_seed(RANK)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def state_after(iteration):
    return {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state(),
            "iteration": iteration}}
def meet(name):
    # ranks of a job wait for each other in each step, as with a collective
    (WHERE / f"{{CYCLE}}.{{name}}.{{RANK}}").touch()
    while not all((WHERE / f"{{CYCLE}}.{{name}}.{{rank}}").exists() for rank in range(WORLD)):
        time.sleep(0.01)
state = state_after(0)
memory_checkpoint.restore(state)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
torch.set_rng_state(state["torch"])
say("rank", RANK, "begins cycle", CYCLE, "at", state["iteration"])
for iteration in range(state["iteration"], {ITERATIONS}):
    meet(iteration)
    if CYCLE == 0 and iteration == {LOST_AT}:
        say("rank", RANK, "waits to be lost")
        time.sleep(1000)
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory_checkpoint.save(iteration + 1, state_after(iteration + 1))
    memory_checkpoint.wait()
    time.sleep(0.3)
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
say("rank", RANK, "ends with", digest.hexdigest())
"""


def weights(ended: Sequence[Finished]) -> list[str]:
    return sorted(line for each in ended for line in re.findall(r"^rank \d ends with \w+$", each.out, re.MULTILINE))


def beginnings(ended: Sequence[Finished], cycle: int) -> set[int]:
    found = (re.findall(rf"^rank \d begins cycle {cycle} at (\d+)$", each.out, re.MULTILINE) for each in ended)
    return {int(iteration) for each in found for iteration in each}


def start(launcher: Launcher, hosts: Hosts, number: int) -> Launched:
    """Start a launcher of the job on a host of its own."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", "--nnodes=3:3"]
    options = [*place, "--max-restarts=3", f"--node-rank={number}"]
    host, env = hosts.inhabitant(number + 1), {"FT_SECRET": SECRET}
    return launcher.start(SCRIPT, *options, script_args=[str(launcher.directory)], host=host, env=env)


def test_lost_nodes_ranks_go_on_from_its_copy_with_equal_weights(launcher: Launcher, four_hosts: Hosts) -> None:
    nodes = [start(launcher, four_hosts, number) for number in range(3)]
    for node in nodes:
        node.wait_for("^rank . begins cycle 0 at 0")
    spare = start(launcher, four_hosts, 3)
    for node in nodes:
        node.wait_for("^rank . waits to be lost", timeout_s=90)
    four_hosts.power_off(3, nodes[2])
    ended = wait_for_all([nodes[0], nodes[1], spare])
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    (iteration,) = beginnings(ended, 1)
    assert LOST_AT - 1 <= iteration <= LOST_AT
    assert f"restored iteration {iteration} from memory (1 rank from other nodes)" in ended[0].err
    undisturbed, where = SCRIPT.replace(f"iteration == {LOST_AT}", "False"), launcher.directory / "undisturbed"
    where.mkdir()
    finished = launcher.run(undisturbed, "--nproc-per-node=3", script_args=[str(where)])
    assert weights(ended) == weights([finished])
