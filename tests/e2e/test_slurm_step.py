"""Launchers that srun has started need no option to meet: what Slurm's variables say will do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.launching import Launched, Launcher
from tests.support.nodes import wait_for_all

WAITS = """
if {handler}:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say("ready", "of", os.environ["WORLD_SIZE"], RANK, os.environ["TORCHELASTIC_RUN_ID"])
forever()
"""


def step(launcher: Launcher, script: str, *options: str, **env: str) -> list[Launched]:
    """One launcher a node, as by srun; all nodes are this machine, and the port is that of a job of our own."""
    job = {
        "SLURM_JOB_ID": str(os.getpid() * 100 + len(launcher.launches)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": "0",
        "XDG_STATE_HOME": str(launcher.directory / "home"),
    }
    # of no use: the tests' own --ft-log-dir is given to each
    shared = f"--ft-log-dir={launcher.directory / 'logs'}"
    return [
        launcher.start(script, shared, *options, env={**job, **env, "SLURM_PROCID": str(rank)}) for rank in range(2)
    ]


def outcomes(directory: Path) -> list[str]:
    return [life["outcome"] for life in json.loads((directory / "result.json").read_text())["lives"]]


def test_launchers_of_a_step_meet_and_a_users_signal_stops_ranks_that_have_no_handler(launcher: Launcher) -> None:
    for handler, outcome in ((False, "stopped"), (True, "finished")):
        nodes = step(launcher, WAITS.format(handler=handler))
        for node in nodes:
            node.wait_for("^ready")
        for node in nodes:
            node.signal(signal.SIGUSR1)
        ended = wait_for_all(nodes)
        assert [each.code for each in ended] == [0, 0]
        assert [each.out.split()[:4] for each in ended] == [["ready", "of", "2", rank] for rank in ("0", "1")]
        assert outcomes(launcher.directory / "logs")[-1] == outcome
    assert f" {os.getpid() * 100}.0.0" in launcher.launches[0].out
