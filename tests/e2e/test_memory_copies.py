"""Copies of memory checkpoints on another node: a lost node's ranks go on from there."""

from __future__ import annotations

import pytest

from tests.e2e.test_memory_checkpoints import beginnings, script, weights
from tests.support.extras import skip_module_without
from tests.support.launching import Launched, Launcher
from tests.support.netns import Hosts
from tests.support.nodes import wait_for_all

skip_module_without("xxhash")

IMPORTED_BEFORE = ()  # torch is enough

pytestmark = pytest.mark.timeout(300)

SECRET = "0123456789abcdef0123456789abcdef"
LOST_AT = 6
SCRIPT = script(f"""
def before(iteration):
    if CYCLE == 0 and iteration == {LOST_AT}:
        say("rank", RANK, "waits to be lost")
        forever()
    time.sleep(0.3)
""")


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
    (iteration,) = {*beginnings(*ended, cycle=1)}
    assert LOST_AT - 1 <= iteration <= LOST_AT
    assert f"restored iteration {iteration} from memory (1 rank from other nodes)" in ended[0].err
    undisturbed, where = SCRIPT.replace(f"iteration == {LOST_AT}", "False"), launcher.directory / "undisturbed"
    where.mkdir()
    finished = launcher.run(undisturbed, "--nproc-per-node=3", script_args=[str(where)])
    assert weights(*ended) == weights(finished)
