"""Command lines as others publish them: each starts, loses a rank, and finishes. Only hosts, ports, paths and the
numbers of nodes and ranks are this machine's.

The lines are facts, written down flag by flag. Not here, because they need what this machine hasn't: the reference's
examples of attribution and log servers (`tests/unit/launcher/test_dry_run.py` has what becomes of their flags).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launching import PRELUDE, Launcher, free_port
from tests.support.nodes import wait_for_all

SCRIPT = """
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for iteration in range(3):
    client.send_heartbeat()
if CYCLE == 0:
    if RANK == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forever()
client.shutdown_workload_monitoring()
"""


@dataclass(frozen=True)
class Line:
    """One, for so many nodes; ``env`` is what the scheduler sets. ``{node}`` is the number of the node."""

    name: str
    flags: str
    nodes: int = 1
    env: str = ""
    wraps: bool = False
    """The script is started by a command."""


LINES = (
    Line(
        "the reference's basic example",
        "--nproc-per-node=2 --max-restarts=3 --ft-initial-rank-heartbeat-timeout=30 --ft-rank-heartbeat-timeout=15",
    ),
    Line(
        "the reference's DDP test",
        "--nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 "
        "--ft-restart-check-interval=0.5 --ft-cfg-path={tmp}/sections.yaml --term-timeout=15",
    ),
    Line(
        "the reference's test of restart policies",
        "--ft-log-level=DEBUG --nproc-per-node=1 --nnodes=2:3 --rdzv-backend=c10d --rdzv_endpoint=localhost:{port} "
        "--max-restarts=5 --ft-restart-policy=any-failed --rdzv-conf=is_host={is_host}",
        nodes=3,
    ),
    Line(
        "the reference's job array",
        "--nnodes 2:2 --nproc-per-node 1 --rdzv-id 77 --rdzv-endpoint 127.0.0.1:{port} "
        "--rdzv-conf join_timeout=1200,store_connect_wait_seconds=300 --max-restarts 7 --ft-cycle-info-dir={tmp}/infos "
        "--ft-per-cycle-applog-prefix={tmp}/job.log --ft-nvrx-logfile={tmp}/nvrx.log "
        "--ft-checkpoint-iteration-file={tmp}/latest_checkpointed_iteration.txt "
        "--ft-rank-section-timeouts setup:900,step:60,checkpointing:300 --ft-rank-out-of-section-timeout 90 "
        "--ft-node-health-check-endpoint=unix://{tmp}/nvhcd.sock --ft-segment 1 --ft-max-no-progress-cycles 3",
        nodes=2,
        env="FT_NVLINK_DOMAIN=rack{node}",
    ),
    # nemo_run's test of its FaultTolerance launcher, and the defaults of the plugin in Bridge's performance scripts
    Line(
        "NeMo-Run, a command",
        "--ft-workload_check_interval 10 --ft-initial_rank_heartbeat_timeout 1800 --ft-rank_heartbeat_timeout 300 "
        "--ft-rank_termination_signal SIGINT --ft-log_level INFO --max-restarts 3 --rdzv-backend c10d "
        "--rdzv-endpoint 127.0.0.1:{port} --rdzv-id 1 --nnodes 2 --nproc-per-node 1 --node-rank {node} --tee 3 "
        "--no-python",
        nodes=2,
        wraps=True,
    ),
    Line(
        "Megatron-Bridge's example",
        "--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{port} --nnodes=1 --nproc-per-node=2 "
        "--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 --ft-rank_out_of_section_timeout=300 "
        "--monitor-interval=5 --max-restarts=3",
        env="GROUP_RANK=0",
    ),
    Line(
        "Megatron-LM's CI",
        "--nproc_per_node 2 --nnodes 1 --master_addr 127.0.0.1 --master_port {port} --node_rank 0 --log-dir {tmp}/logs "
        "--tee 0:3,1:3 --redirects 3 --max-restarts=3",
    ),
    Line(
        "Kubeflow's PyTorchJob", "", nodes=2, env="{pytorchjob} PET_NPROC_PER_NODE=1 PET_NNODES=2:2 PET_MAX_RESTARTS=3"
    ),
    Line(
        "Kubeflow's TrainJob",
        "--max-restarts=3",
        nodes=2,
        env="PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={node} PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT={port}",
    ),
)
PYTORCHJOB = "PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=127.0.0.1:{port} PET_RDZV_ID=job"
SECTIONS = """
fault_tolerance:
    initial_rank_heartbeat_timeout: null
    rank_heartbeat_timeout: null
    rank_section_timeouts: {init: 20, step: 10, checkpoint: 30}
    rank_out_of_section_timeout: 30
    log_level: "DEBUG"
"""


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_published_command_line_starts_loses_a_rank_and_finishes(
    launcher: Launcher, tmp_path: Path, line: Line
) -> None:
    (tmp_path / "sections.yaml").write_text(SECTIONS)
    port = free_port()
    (tmp_path / "train.py").write_text(PRELUDE + SCRIPT)
    wrapped = ["sh", "-c", 'exec "$0" "$1"', sys.executable, str(tmp_path / "train.py")]
    nodes = []
    for node in range(line.nodes):
        known = {"port": port, "tmp": tmp_path, "node": node, "is_host": int(node == 0)}
        flags = line.flags.format(**known).split()
        words = line.env.replace("{pytorchjob}", PYTORCHJOB).format(**known).split()
        env = dict(word.split("=", 1) for word in words)
        nodes.append(launcher.start(wrapped if line.wraps else SCRIPT, *flags, env=env))
    for launched, ended in zip(nodes, wait_for_all(nodes), strict=True):
        assert ended.code == 0, ended.err
        assert [end[1:3] for end in launched.ends()] == [("signal", "restart"), (None, "finish")]
    assert (-9, False) in [how for one in nodes for how in one.exits().values()]
