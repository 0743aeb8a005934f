"""What ranks find in their environment beside what torchrun puts there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import megatron_ft
from megatron_ft.core.run_ahead import REFERENCE_NAMES_VARIABLE
from megatron_ft.launcher.base.environment import without_secret

__all__ = ["STARTUP", "rank_environment", "with_startup"]

STARTUP = os.path.join(os.path.dirname(os.path.abspath(megatron_ft.__file__)), "rank", "run_ahead", "startup")
"""A directory with a ``sitecustomize``, which Python imports before the script."""


def rank_environment(environ: Mapping[str, str], *, reference_names: bool, watches: bool = False) -> dict[str, str]:
    """The launcher's own environment, as ranks have it, without the job's secret. What they start inherits it.

    With ``reference_names``, who imports ``nvidia_resiliency_ext.fault_tolerance`` there gets this package.
    ``watches``: the collectives of a script that calls no hooks are to be counted.
    """
    ours = without_secret(environ)
    ours.pop(REFERENCE_NAMES_VARIABLE, None)
    if reference_names:
        ours[REFERENCE_NAMES_VARIABLE] = "on"
    if reference_names or watches:
        ours["PYTHONPATH"] = with_startup(environ.get("PYTHONPATH"))
    return ours


def with_startup(python_path: str | None) -> str:
    """A PYTHONPATH with that directory first, once."""
    others = [entry for entry in (python_path or "").split(os.pathsep) if entry != STARTUP]
    return os.pathsep.join([STARTUP, *others] if python_path else [STARTUP])
