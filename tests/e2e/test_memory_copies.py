"""Copies of memory checkpoints on another node: a lost node's ranks go on from there."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.extras import skip_module_without
from tests.support.launching import Finished, Launched, Launcher, command_line, launcher, open_files, wait_until
from tests.support.netns import Hosts, four_hosts, seven_hosts
from tests.support.nodes import meeting_place, wait_for_all

skip_module_without("xxhash")

__all__ = ["four_hosts", "launcher", "seven_hosts"]

pytestmark = pytest.mark.timeout(300)

SECRET = "0123456789abcdef0123456789abcdef"
ITERATIONS, SAVED_AT, LOST_AT = 12, 3, 6
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
state, saved = state_after(0), WHERE / f"saved.{{RANK}}"
if saved.exists():
    state = torch.load(saved, weights_only=True)
memory_checkpoint.restore(state, newer_than=state["iteration"])
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
    if iteration + 1 == {SAVED_AT}:
        torch.save(state_after(iteration + 1), saved)
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


def start(
    launcher: Launcher, place: Sequence[str], name: str, hosts: Hosts | None, numbers: Sequence[int]
) -> list[Launched]:
    """Launchers of one job, on these hosts."""
    where = launcher.directory / name
    where.mkdir(exist_ok=True)
    return [
        launcher.start(
            SCRIPT,
            *place,
            "--max-restarts=3",
            f"--node-rank={number}",
            script_args=[str(where)],
            host=None if hosts is None else hosts.inhabitant(number + 1),
            env={"FT_SECRET": SECRET},
        )
        for number in numbers
    ]


def undisturbed(launcher: Launcher, ranks: int) -> list[str]:
    """What ranks end with that nobody disturbs, on one node."""
    script, where = SCRIPT.replace(f"iteration == {LOST_AT}", "False"), launcher.directory / "undisturbed"
    where.mkdir()
    finished = launcher.run(script, f"--nproc-per-node={ranks}", script_args=[str(where)])
    assert finished.code == 0, finished.err
    return weights([finished])


def test_lost_nodes_ranks_go_on_from_its_copy_with_equal_weights(launcher: Launcher, four_hosts: Hosts) -> None:
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", "--nnodes=3:3"]
    nodes = start(launcher, place, "lost", four_hosts, (0, 1, 2))
    for node in nodes:
        node.wait_for("^rank . begins cycle 0 at 0")
    spare = start(launcher, place, "lost", four_hosts, (3,))
    for node in nodes:
        node.wait_for("^rank . waits to be lost", timeout_s=90)
    four_hosts.power_off(3, nodes[2])
    ended = wait_for_all([nodes[0], nodes[1], *spare])
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    assert weights(ended) == undisturbed(launcher, 3)
    (iteration,) = beginnings(ended, 1)
    assert LOST_AT - 1 <= iteration <= LOST_AT
    assert f"restored iteration {iteration} from memory (rank 2 from " in ended[0].err


def test_two_neighbours_lost_at_once_fall_back_to_the_persistent_checkpoint(
    launcher: Launcher, seven_hosts: Hosts
) -> None:
    """The copy of the first one's snapshot was on the second one."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", "--nnodes=5:5"]
    nodes = start(launcher, place, "lost", seven_hosts, range(5))
    for node in nodes:
        node.wait_for("^rank . begins cycle 0 at 0", timeout_s=120)
    spares = start(launcher, place, "lost", seven_hosts, (5, 6))
    for node in nodes:
        node.wait_for("^rank . waits to be lost", timeout_s=120)
    for number in (3, 4):
        seven_hosts.cut(number)
    for number in (3, 4):
        seven_hosts.power_off(number, nodes[number - 1])
    ended = wait_for_all([nodes[0], nodes[1], nodes[4], *spares])
    assert [each.code for each in ended] == [0] * 5, ended[0].err
    assert weights(ended) == undisturbed(launcher, 5)
    assert beginnings(ended, 1) == {SAVED_AT}
    assert "cycle 1 restores nothing from memory: " in ended[0].err


LARGE = """
import pathlib, torch
from megatron_ft import memory_checkpoint
WHERE = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
state = {"tensor": torch.zeros(2 << 20), "iteration": 0}
restored = memory_checkpoint.restore(state)
say("rank", RANK, "begins cycle", CYCLE, "at", restored, "with", state["tensor"][0].item())
iteration = state["iteration"]
while not (WHERE / "end").exists():
    iteration += 1
    memory_checkpoint.save(iteration, {"tensor": torch.full((2 << 20,), float(iteration)), "iteration": iteration})
    time.sleep(0.5)
"""
"""Ranks that save 8 MB twice a second, which takes 1 s to copy at the bandwidth that they get below."""


def keepers(node: Launched) -> list[int]:
    return [stat.pid for stat in node.alive() if "--xxhash" in command_line(stat.pid)]


def is_copied_to(keeper: int) -> bool:
    """Whether another node's keeper is connected."""
    links = open_files(keeper)
    tables = (Path(f"/proc/{keeper}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [row for table in tables for row in map(str.split, table) if f"socket:[{row[9]}]" in links]
    port = {row[1].rpartition(":")[2] for row in rows if row[3] == "0A"}
    return any(row[3] == "01" and row[1].rpartition(":")[2] in port for row in rows)


def test_keeper_killed_in_the_middle_of_a_copy_is_replaced_and_later_copies_are_restored(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=3:3", "--max-restarts=3", "--ft-memory-checkpoint-bandwidth=8")

    def node(number: int, *options: str) -> Launched:
        given = [*place, f"--node-rank={number}", *options]
        return launcher.start(LARGE, *given, script_args=[str(launcher.directory)], env={"FT_SECRET": SECRET})

    nodes = [node(number) for number in range(3)]
    for each in nodes:
        each.wait_for("^rank . begins cycle 0 at None", timeout_s=60)
    wait_until(lambda: len(keepers(nodes[2])) == 1, 30)
    (keeper,) = keepers(nodes[2])
    wait_until(lambda: is_copied_to(keeper), 30)
    os.kill(keeper, signal.SIGKILL)
    nodes[1].wait_for(r"the node at \S+ has no copy of iteration \d+: ", timeout_s=60)
    wait_until(lambda: len(keepers(nodes[2])) == 1, 30)
    (keeper,) = keepers(nodes[2])
    # its first copy may be of a snapshot that node 2 lacks; the second one is complete once the third one begins
    for _ in range(3):
        wait_until(lambda: not is_copied_to(keeper), 30)
        wait_until(lambda: is_copied_to(keeper), 60)
    nodes[1].destroy()
    Path(nodes[1].temp_dir).mkdir()  # where the fixture looks for what is left
    again = node(1)
    again.wait_for(r"^rank 1 begins cycle 1 at \d+", timeout_s=90)
    (launcher.directory / "end").touch()
    ended = wait_for_all([nodes[0], nodes[2], again])
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    (begun,) = {line for each in ended for line in re.findall(r"begins cycle 1 (at .*)$", each.out, re.MULTILINE)}
    (iteration,) = re.findall(r"at (\d+) with", begun)
    assert begun == f"at {iteration} with {float(iteration)}"
    assert f"restored iteration {iteration} from memory (rank 1 from " in ended[0].err
