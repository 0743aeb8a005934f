"""The launcher's environment as the user's processes get it, ranks and others: without the job's secret."""

from __future__ import annotations

import os
from collections.abc import Mapping

import megatron_ft
from megatron_ft.core.run_ahead import REFERENCE_NAMES_VARIABLE

STARTUP = os.path.join(os.path.dirname(os.path.abspath(megatron_ft.__file__)), "rank", "run_ahead", "startup")
"""A directory with a ``sitecustomize``, which Python imports before the script."""


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """All but the job's secret: scripts log their environment. Who may read FT_SECRET_FILE is up to the file's mode."""
    return {name: value for name, value in environ.items() if name != "FT_SECRET"}


def rank_environment(environ: Mapping[str, str], *, reference_names: bool, watches: bool = False) -> dict[str, str]:
    """The environment of ranks beside what torchrun puts there. What they start inherits it.

    With ``reference_names``, an import of ``nvidia_resiliency_ext.fault_tolerance`` there finds this package.
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
