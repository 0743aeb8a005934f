"""The next ranks start only when the driver has taken back the memory of the last ones. The driver is ours."""

from __future__ import annotations

import os
import re

from tests.support.launching import ROOT, Launcher

# loaded by Python itself, before the launcher looks for a driver
DRIVER = """
import os
from megatron_ft.link.base.process_facts import Holding
from megatron_ft.link.linux import nvml
def holdings(library):
    with open(library) as file:
        return [Holding(0, int(pid), 3 << 30) for pid in file.read().split()] + [Holding(0, 1, 1 << 30)]
nvml.load = lambda: os.environ["HELD"]
nvml.holdings = holdings
"""
SCRIPT = """
say("cycle", CYCLE)
if CYCLE == 0:
    with open(os.environ["HELD"], "a") as file:
        file.write(f"{os.getpid()} ")
    if RANK == 1:
        sys.exit(3)
    forever()
"""


def test_the_next_ranks_wait_for_the_memory_of_the_last_ones(fresh_launcher: Launcher) -> None:
    held = fresh_launcher.directory / "held"
    held.touch()
    (fresh_launcher.directory / "sitecustomize.py").write_text(DRIVER)
    path = os.pathsep.join([str(fresh_launcher.directory), str(ROOT)])
    launched = fresh_launcher.start(
        SCRIPT, "--nproc-per-node=2", "--max-restarts=1", env={"PYTHONPATH": path, "HELD": str(held)}
    )
    launched.wait_for("waiting for device memory of the last cycle, at most 10 s: process [0-9]+ on GPU 0")
    assert "cycle 1" not in launched.out
    pids = {rank["pid"] for event in launched.events("cycle_started") for rank in event["ranks"]}
    assert {int(pid) for pid in held.read_text().split()} <= pids
    held.write_text("")
    finished = launched.wait()
    assert finished.code == 0
    assert len(re.findall("^cycle 1$", finished.out, re.MULTILINE)) == 2
    (event,) = launched.events("device_memory")
    assert event["held"] == []
    assert event["waited_s"] > 1
