"""The launcher's environment for the user's processes, ranks and others: without the job's secret."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.link.base.rank_variables import REFERENCE_NAMES_VARIABLE
from megatron_ft.link.log import LEVEL_VARIABLE
from megatron_ft.run_ahead.startup import with_startup


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
