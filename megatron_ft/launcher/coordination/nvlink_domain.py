"""Which NVLink domain this node is in, for ``--ft-segment``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from megatron_ft.core.errors import ConfigError

__all__ = ["VARIABLE", "nvlink_domain"]

VARIABLE = "FT_NVLINK_DOMAIN"
_ANSWER_S = 60.0
_UUID = re.compile(r"ClusterUUID\s*:\s*([0-9A-Fa-f-]+)")


def nvlink_domain(environ: Mapping[str, str]) -> str:
    """The variable's value, else the cluster that nvidia-smi names for the node's GPUs.

    Raises:
        ConfigError: neither the user nor the driver names one.
    """
    named = environ.get(VARIABLE, "").strip()
    if named:
        return named
    found: set[str] = {uuid for uuid in _UUID.findall(_told_by_driver()) if uuid.strip("0-")}
    if len(found) == 1:
        return found.pop()
    told = "several ClusterUUIDs" if found else "no ClusterUUID"
    raise ConfigError(
        f"--ft-segment: nvidia-smi names {told} on this node; leave the option out, or name the node's NVLink "
        f"domain in {VARIABLE}"
    )


def _told_by_driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, "-q"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--ft-segment: {command} -q: {error}") from error
    return done.stdout
