"""Early parse of the command line, to start the fork server before torch is imported.

A wrong guess is noticed when the command line is fully parsed, and only costs the time since: a server has no effect
visible from outside.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.run_ahead import Ahead, without_ranks
from megatron_ft.launcher.base.environment import rank_environment

_FLAGS = {
    "help",
    "help-all",
    "version",
    *(each.name for each in TORCHRUN_OPTIONS.values() if each.is_flag),
    *(name for each in LAUNCHER_OPTIONS.values() if each.is_flag for name in each.names),
}
_NEEDED = ("preload", "watch_collectives", "reference_names", "per_cycle_applog_prefix")
_SHORT = {"m": "module", "h": "help", "r": "redirects", "t": "tee"}


def parse_early(argv: Sequence[str], environ: Mapping[str, str]) -> Ahead | None:
    """Return what to run ahead; None if ranks are fresh interpreters, or no script is to be run by this Python."""
    given = {
        name.removeprefix("PET_").lower().replace("_", "-"): v for name, v in environ.items() if name[:4] == "PET_"
    }
    words = list(argv)
    while words and (option := re.fullmatch(r"--([a-z][^=]*)(=.*)?|-([mhrt])(=?[^-].*)?", words[0])):
        words.pop(0)
        name = (option[1] or _SHORT[option[3]]).replace("_", "-")
        inline = option[2] or option[4]
        if name in _FLAGS:
            given[name] = "1"
        elif inline is not None:
            given[name] = inline.removeprefix("=")
        else:
            given[name] = words.pop(0) if words else ""
    try:
        preload, watch, names, prefix = (_value(field, given) for field in _NEEDED)
    except ConfigError:
        return None  # reported when the command line is parsed
    is_other = "NVRX_GPUS_PER_NUMA" in environ or any(
        given.get(name, "0") != "0"
        for name in ("help", "help-all", "version", "ft-dry-run", "no-python", "run-path", "numa-binding")
    )
    if preload is None or is_other or not words or words[0].startswith("-") or "${" in words[0]:
        return None
    command = [sys.executable, "-u", *(["-m"] if given.get("module", "0") == "1" else []), *words]
    is_one = "OMP_NUM_THREADS" in environ or given.get("nproc-per-node", "1").strip() == "1"
    logs_specs = given.get("logs-specs") or prefix
    is_shared = shares_output(given.get("redirects", "0"), given.get("tee", "0"), logs_specs)
    own = rank_environment(environ, reference_names=names == "on", watches=watch != "off")
    # torch will add it for the ranks
    return Ahead(command, without_ranks({**own, **({} if is_one else {"OMP_NUM_THREADS": "1"})}), preload, is_shared)


def _value(field: str, given: Mapping[str, str]) -> Any:
    """Return the parsed value of one of this package's options. Raises ConfigError."""
    option = LAUNCHER_OPTIONS[field]
    text = next((given[name] for name in option.names if name in given), None)
    return option.default if text is None else option.parse(text)


def shares_output(redirects: object, tee: object, logs_specs: object) -> bool:
    """Return True if torchrun's options leave the ranks' output where the launcher's goes."""
    return str(redirects) == str(tee) == "0" and logs_specs is None
