"""What torchrun's options of the rendezvous mean here, where that isn't what torchrun's own help says."""

from __future__ import annotations

import argparse

__all__ = ["say_what_they_mean"]

_HELP = {
    "nnodes": "Number of nodes, or MIN:MAX: MIN are needed to train, up to MAX take part, more stand by as spares.",
    "rdzv_backend": "How nodes meet. Not given, or c10d: at the coordinator, a process that ft_launcher starts at the "
    "endpoint. static, etcd-v2 and others: through torch, without spare nodes and min-healthy.",
    "rdzv_endpoint": "HOST:PORT of the coordinator. More hosts, as in a:29500,b,c, are where it is looked for when "
    "the first doesn't answer. Default: --master-addr:--master-port.",
    "rdzv_conf": "name=value,... The coordinator knows join_timeout (seconds for which a round waits for MIN nodes, "
    "default 600), last_call_timeout (seconds for which it then waits for more) and is_host (whether the first "
    "endpoint is this machine). Others are for torch's own backends.",
    "standalone": "A job of one node, whatever the other options of the rendezvous say.",
    "node_rank": "Orders the nodes, from 0. Default: GROUP_RANK, SLURM_PROCID or SLURM_NODEID under srun, "
    "JOB_COMPLETION_INDEX, else the order in which they arrive.",
    "master_addr": "Host of the coordinator, if no --rdzv-endpoint is given. Default: 127.0.0.1.",
    "master_port": "Its port. The ranks meet at another one (MASTER_PORT), new in each cycle. Default: 29500.",
    "local_addr": "Address of this node for others. Default: the one from which it reaches the endpoint.",
}
"""By the name of the option in the namespace."""


def say_what_they_mean(parser: argparse.ArgumentParser) -> None:
    """Have ``--help`` say so."""
    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
