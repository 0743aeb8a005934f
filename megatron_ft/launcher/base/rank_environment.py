"""The launcher's environment for the user's processes, without the job's secret; the script whose imports they share.

The script is found on the command line before torch is imported, so that its imports begin at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from megatron_ft.launcher.base.given_flags import given_flags
from megatron_ft.link.base.rank_variables import REFERENCE_NAMES_VARIABLE, without_ranks
from megatron_ft.link.log import LEVEL_VARIABLE
from megatron_ft.link.messages.fork_server_messages import Orders
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


_DECIDE = {"no_python", "run_path", "numa_binding", "ft_dry_run", "ft_preload"}
_DECIDE |= {"ft_reference_names", "ft_watch_collectives", ""}
"""Options that decide what ranks are; with one of them, the fork server starts once the command line is parsed."""


def find_script(argv: Sequence[str], environ: Mapping[str, str]) -> Orders | None:
    """Return whose imports are to be shared; None if that isn't known yet. A wrong guess costs only time."""
    flags, words = given_flags(argv)
    given = {flag.dest: flag.value for flag in flags}
    if not words or "${" in words[0] or any(name[:4] == "PET_" for name in environ) or _DECIDE & given.keys():
        return None
    environment = rank_environment(environ, reference_names=True, watches=True)
    if (given.get("nproc_per_node") or "1").strip() != "1":
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torch does for the ranks
    module = ["-m"] if "module" in given else []
    return Orders([sys.executable, "-u", *module, *words], without_ranks(environment))


def why_fresh(argv: Sequence[str]) -> str | None:
    """Return why ranks with this command can't be forked; None if they can. torch builds it: interpreter, "-u", ..."""
    if argv[0] != sys.executable:
        return "the ranks aren't run by this Python"
    if len(argv) < 3 or argv[1] != "-u":
        return "the ranks' interpreter has options of its own"
    if argv[2].startswith("-") and (argv[2] != "-m" or len(argv) < 4):
        return "the script isn't a file"
    return None
