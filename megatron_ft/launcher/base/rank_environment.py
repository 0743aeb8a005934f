"""The launcher's environment for the user's processes, ranks and others: without the job's secret."""

from __future__ import annotations

import os
from collections.abc import Mapping

import megatron_ft
from megatron_ft.core.rank_variables import REFERENCE_NAMES_VARIABLE
from megatron_ft.ipc.log import LEVEL_VARIABLE

STARTUP = os.path.join(os.path.dirname(os.path.abspath(megatron_ft.__file__)), "run_ahead", "startup")
"""Directory with a ``sitecustomize``, which Python imports before the script."""


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the job's secret, because scripts log it. FT_SECRET_FILE has a file mode."""
    return {name: value for name, value in environ.items() if name != "FT_SECRET"}


def rank_environment(environ: Mapping[str, str], *, reference_names: bool, watches: bool = False) -> dict[str, str]:
    """Return the environment of ranks and their children, before torchrun's additions.

    With ``reference_names``, an import of ``nvidia_resiliency_ext.fault_tolerance`` finds this package. ``watches``:
    count the collectives of a script without hooks.
    """
    ours = without_secret(environ)
    ours.pop(REFERENCE_NAMES_VARIABLE, None)
    ours.pop(LEVEL_VARIABLE, None)  # set after the fork server was started, whose environment has to match
    if reference_names:
        ours[REFERENCE_NAMES_VARIABLE] = "on"
    if reference_names or watches:
        ours["PYTHONPATH"] = with_startup(environ.get("PYTHONPATH"))
    return ours


def with_startup(python_path: str | None) -> str:
    """Return a PYTHONPATH with that directory first, once."""
    others = [entry for entry in (python_path or "").split(os.pathsep) if entry != STARTUP]
    return os.pathsep.join([STARTUP, *others] if python_path else [STARTUP])
