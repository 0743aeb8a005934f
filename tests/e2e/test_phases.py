"""Where the time of a restart went: the launcher's line, its event log, and the report."""

from __future__ import annotations

import re

from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import split_runs
from tests.support.launching import Launcher

SCRIPT = """
from megatron_ft import RankMonitorClient
time.sleep(0.2)  # as imports do
client = RankMonitorClient()
client.init_workload_monitoring()
time.sleep(0.15)
for iteration in range(3 * CYCLE, 6):
    client.set_iteration(iteration)
    time.sleep(0.02)
    if (RANK, CYCLE, iteration) == (1, 0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
while CYCLE == 0:
    time.sleep(1)
client.shutdown_workload_monitoring()
"""


def test_every_phase_of_a_restart_is_told(launcher: Launcher) -> None:
    launched = launcher.start(SCRIPT, "--nproc-per-node=2", "--max-restarts=1")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    (line,) = re.findall(
        r"cycle 1 is training again (\d+\.\d+) s after the failure was detected \((.*)\)", finished.err
    )
    names = [part.rsplit(" ", 1)[0] for part in line[1].split(", ")]
    assert names == ["stop", "rendezvous", "ranks created", "user code", "imports", "set up", "first step"]
    (event,) = launched.events("training_again")
    assert list(event["seconds"]) == names
    assert all(seconds >= 0 for seconds in event["seconds"].values())
    assert event["seconds"]["imports"] >= 0.2
    assert event["seconds"]["set up"] >= 0.1
    assert event["seconds"]["first step"] >= 0.02
    assert abs(sum(event["seconds"].values()) - float(line[0])) < 0.01

    (run,) = split_runs(read_directory(launched.log_dir))
    failed = run.cycles[0]
    assert failed.phases == event["seconds"]
    assert failed.training_again_after_s == sum(event["seconds"].values())
