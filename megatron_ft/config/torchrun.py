"""torchrun's own options, for parsers without torch, and the meaning of some of them here."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 29500
"""Port of the coordinator, and torchrun's ``--master-port``."""
C10D_PORT = 29400
"""Port of the coordinator with ``--rdzv-backend c10d``."""
ETCD_BACKENDS = ("etcd", "etcd-v2")
ETCD_PORT = 2379
JOIN_TIMEOUT_S = 600.0
"""Seconds for which a round waits for nodes that it needs."""


@dataclass(frozen=True)
class TorchrunOption:
    """One option of torchrun's; underscores may replace its dashes."""

    name: str
    here: str = ""
    """Meaning in ft_launcher, where it differs from torchrun's own help."""
    choices: tuple[str, ...] = ()
    """Values that are served here; empty: all."""
    is_flag: bool = False
    letter: str = ""

    @property
    def dest(self) -> str:
        """Attribute of parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """Spellings, the shortest first."""
        words = [*([self.letter] if self.letter else []), f"--{self.name}"]
        return [*words, f"--{self.dest}"] if "-" in self.name else words


TORCHRUN_OPTIONS = {
    each.dest: each
    for each in (
        TorchrunOption(
            "nnodes",
            "Number of nodes, or MIN:MAX. MIN are needed to train, up to MAX take part, more are on standby as spares.",
        ),
        TorchrunOption("nproc-per-node"),
        TorchrunOption(
            "rdzv-backend",
            "Nodes always meet at the coordinator, a process that ft_launcher starts at the endpoint. c10d, or not "
            "given: MIN to MAX nodes. static: exactly MAX nodes. etcd: any launcher may start the coordinator; the "
            "endpoint is that of etcd, whose v3 is used (etcd-v2 is the same). Others are refused.",
            choices=("c10d", "static", *ETCD_BACKENDS),
        ),
        TorchrunOption(
            "rdzv-endpoint",
            "HOST:PORT of the coordinator, which the launcher on that host starts. Default: --master-addr:"
            "--master-port. If neither is given: the scheduler's (see --scheduler), else for one node any free port, "
            "for several "
            f"localhost:{C10D_PORT} with --rdzv-backend c10d, 127.0.0.1:{DEFAULT_PORT} without it.",
        ),
        TorchrunOption("rdzv-id"),
        TorchrunOption(
            "rdzv-conf",
            "Settings of the coordinator, name=value,...: join_timeout, last_call_timeout and is_host. join_timeout: "
            f"seconds for which a round waits for MIN nodes, default {JOIN_TIMEOUT_S:g}; timeout is the same. "
            "last_call_timeout: seconds for which the round then waits for more. "
            "is_host: whether the first endpoint is this machine. With --rdzv-backend etcd: protocol (http or https), "
            "cacert, cert, key, user, password. store_type=file is refused, others have no effect.",
        ),
        TorchrunOption(
            "standalone",
            "A job of one node, whatever the other options of the rendezvous say.",
            is_flag=True,
        ),
        TorchrunOption("max-restarts"),
        TorchrunOption("monitor-interval", "No effect: the launcher hears of the end of a rank at once."),
        TorchrunOption("start-method"),
        TorchrunOption("event-log-handler"),
        TorchrunOption("role"),
        TorchrunOption("module", is_flag=True, letter="-m"),
        TorchrunOption("no-python", is_flag=True),
        TorchrunOption("run-path", is_flag=True),
        TorchrunOption("log-dir"),
        TorchrunOption("redirects", letter="-r"),
        TorchrunOption("tee", letter="-t"),
        TorchrunOption("local-ranks-filter"),
        TorchrunOption("duplicate-stdout-filters"),
        TorchrunOption("duplicate-stderr-filters"),
        TorchrunOption(
            "node-rank",
            "Orders the nodes, from 0. Default: GROUP_RANK, SLURM_PROCID or SLURM_NODEID under srun, "
            "JOB_COMPLETION_INDEX, else the order of the host names, the coordinator's host first.",
        ),
        TorchrunOption("master-addr", "Host of the coordinator, if no --rdzv-endpoint is given. Default: 127.0.0.1."),
        TorchrunOption(
            "master-port",
            "Port of the coordinator. The ranks meet at another one (MASTER_PORT), new in each cycle. "
            f"Default: {DEFAULT_PORT}; see --rdzv-endpoint.",
        ),
        TorchrunOption(
            "local-addr", "Address of this node for others. Default: the one from which it reaches the endpoint."
        ),
        TorchrunOption("logs-specs"),
        TorchrunOption("numa-binding"),
        TorchrunOption(
            "shutdown-timeout",
            "The same as --term-timeout, which wins if both are given. Default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else "
            "that of --term-timeout (1800 s).",
        ),
        TorchrunOption("signals-to-handle"),
        TorchrunOption("virtual-local-rank", is_flag=True),
    )
}
"""Options by their name in the namespace."""
