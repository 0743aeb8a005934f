"""``python -m megatron_ft.cli.node_service ENDPOINT SECONDS``: ask a node health service whether this node is fit.

The launcher runs it before each round, for ``--ft-node-health-check-endpoint``. Exit code 1: the service says that the
node isn't fit. A service that is missing, or can't be asked, doesn't keep a node out: exit code 0, and a line.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.node_service import METHOD, REQUEST, judge, socket_of


def main(argv: list[str]) -> int:
    """Ask the service and return the exit code."""
    endpoint, seconds = argv[0], float(argv[1])
    path = socket_of(endpoint)
    if not os.path.exists(path):
        return _unasked(endpoint, "its socket isn't there")
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError as error:
        return _unasked(endpoint, str(error))
    try:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            answer = channel.unary_unary(METHOD)(REQUEST, timeout=seconds)
    except grpc.RpcError as error:
        return _unasked(endpoint, f"{error.code().name}: {error.details()}")
    try:
        why = judge(answer)
    except ProtocolError as error:
        return _unasked(endpoint, f"it answered in another protocol: {error}")
    if why:
        print(f"{endpoint}: {why}")
    return 1 if why else 0


def _unasked(endpoint: str, why: str) -> int:
    print(f"megatron_ft: the node health service {endpoint} wasn't asked: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
