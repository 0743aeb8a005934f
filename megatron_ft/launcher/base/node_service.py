"""``--ft-node-health-check-endpoint`` as a command, run with the user's own."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys

from megatron_ft.core.config.launcher_options import LauncherOptions
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.node_service import socket_of

__all__ = ["command", "doubts"]

_TIMEOUT_S = 60.0
_SHARE = 0.8
"""The service's share of the time that both checks have together: a slow service is reported as such."""


def command(options: LauncherOptions) -> str | None:
    """The command for /bin/sh; None if neither a service nor a command is configured."""
    endpoint, own = options.node_health_check_endpoint, options.node_health_command
    if endpoint is None:
        return own
    seconds = (options.node_health_timeout or _TIMEOUT_S) * _SHARE
    asks = shlex.join([sys.executable, "-m", "megatron_ft.cli.node_service", endpoint, f"{seconds:g}"])
    return asks if own is None else f"{asks} && {{ {own}\n}}"


def doubts(endpoint: str | None) -> list[str]:
    """Why that service can't be asked, as far as is known at the start.

    Raises:
        ConfigError: it isn't the socket of one.
    """
    if endpoint is None:
        return []
    try:
        path = socket_of(endpoint)
    except ValueError as error:
        raise ConfigError(f"--ft-node-health-check-endpoint: {error}") from None
    if importlib.util.find_spec("grpc") is None:
        return ["--ft-node-health-check-endpoint: the service isn't asked: the Python package grpcio isn't installed"]
    return [] if os.path.exists(path) else [f"--ft-node-health-check-endpoint: there is no {path} yet"]
