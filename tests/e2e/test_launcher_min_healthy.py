"""``--restart-policy min-healthy`` with three launchers on one machine: who is disturbed by what, and who isn't."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tests.support.launching import START_S, Finished, Launched, Launcher, wait_until
from tests.support.nodes import cycles_of, meeting_place, rendezvous_settings, tell, wait_for_all

GIVING_UP = "no restarts left, giving up"

# each node does what the test's files tell it to
SCRIPT = """
import pathlib
WHERE = pathlib.Path(sys.argv[1])
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "count", os.environ["TORCHELASTIC_RESTART_COUNT"])
(WHERE / f"pid-{CYCLE}-{RANK}").write_text(str(os.getpid()))
def told(name):
    return (WHERE / name).exists()
while not told("finish") and not told(f"finish-{CYCLE}-{RANK}"):
    if told(f"fail-{CYCLE}-{RANK}"):
        sys.exit(7)
    time.sleep(0.02)
"""


def start_three(launcher: Launcher, *options: str) -> list[Launched]:
    """Three nodes, of which one may be lost. The first one founds the job."""
    place = meeting_place("--nnodes=2:3", "--restart-policy=min-healthy", *options)
    settings = [rendezvous_settings(is_host=not number) for number in range(3)]
    return [launcher.start(SCRIPT, *place, each, script_args=[str(launcher.directory)]) for each in settings]


def by_rank(nodes: Sequence[Launched], cycle: int = 0) -> list[Launched]:
    """Launches in the order of the ranks of a cycle."""
    for node in nodes:
        node.wait_for(rf"^cycle {cycle} of")
    found = {min(map(int, re.findall(rf"^cycle {cycle} of (\d+)", node.out, re.MULTILINE))): node for node in nodes}
    return [found[rank] for rank in sorted(found)]


def lines_with(ended: Sequence[Finished], pattern: str) -> list[list[str]]:
    return [[line for line in finished.lines if re.search(pattern, line)] for finished in ended]


def test_first_unhealthy_node_of_three_disturbs_nobody_second_restarts_all(launcher: Launcher) -> None:
    nodes = by_rank(start_three(launcher, "--max-restarts=1", "--nproc-per-node=2", "--workers-stop-timeout=1"))
    tell(launcher, "fail-0-2")
    for node in nodes:
        node.wait_for("continuing with 2 healthy nodes, at least 2 required")
    # the other rank of the unhealthy node goes on, too: it may be saving something
    files = [launcher.directory / f"pid-0-{rank}" for rank in (0, 1, 3, 4, 5)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in files), START_S)
    pids = [path.read_text() for path in files]
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert [set(cycles_of(node)) for node in nodes] == [{"0"}] * 3
    tell(launcher, "fail-0-4")
    for node in nodes:
        node.wait_for("^cycle 1 of . in 6 count 1", count=2)
    # of other ranks than before: the budget is the job's, not that of each launcher
    again = by_rank(nodes, cycle=1)
    for rank in (4, 5):
        tell(launcher, f"finish-1-{rank}")
    tell(launcher, "fail-1-0")
    again[0].wait_for("cycle 1: node 0 .* is unhealthy: rank 0 exited with code 7; continuing")
    tell(launcher, "fail-1-2")
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [1, 1, 1]
    # told alike on all nodes
    for cycle, bad, follows in ((0, (1, 2), "restarting as cycle 1, 0 of 1 restart left"), (1, (0, 1), GIVING_UP)):
        told = "; ".join(rf"node {n} \(.*\) is unhealthy: rank {2 * n} exited with code 7" for n in bad)
        for lines in lines_with(ended, f"^cycle {cycle} ended"):
            assert len(lines) == 1
            assert re.fullmatch(
                f"cycle {cycle} ended: 1 healthy node, at least 2 required: {told}; {follows}", lines[0]
            )
    assert not any("FAILED" in finished.err for finished in wait_for_all(again)), "torch's table is for DEBUG"
