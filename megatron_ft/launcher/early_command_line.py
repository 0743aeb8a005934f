"""The script on the command line, found before torch is imported, so that its imports begin at the same time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.core.messages.fork_server_messages import Orders
from megatron_ft.core.rank_variables import without_ranks
from megatron_ft.launcher.base.rank_environment import rank_environment

_FLAGS = {name for each in LAUNCHER_OPTIONS.values() if each.is_flag for name in each.names}
_FLAGS |= {each.name for each in TORCHRUN_OPTIONS.values() if each.is_flag} | {"m"}
_DECIDE = {"h", "help", "help-all", "version", "ft-dry-run", "no-python", "run-path", "numa-binding", "ft-preload"}
_DECIDE |= {"ft-reference-names", "ft-watch-collectives"}
"""Options that decide what ranks are; with one of them, the fork server starts once the command line is parsed."""


def find_script(argv: Sequence[str], environ: Mapping[str, str]) -> Orders | None:
    """Return whose imports are to be shared; None if that isn't known yet. A wrong guess costs only time."""
    words, ranks = list(argv), "1"
    module: list[str] = []
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in _DECIDE or not name:
            return None
        is_short = len(name) > 1 and name[0] in "rt" and not name[1].isalpha()  # -r3
        if name not in _FLAGS and not equals and not is_short:
            value = words.pop(0) if words else ""
        ranks = value if name == "nproc-per-node" else ranks
        module = ["-m"] if name in ("m", "module") else module
    if not words or "${" in words[0] or any(name[:4] == "PET_" for name in environ):
        return None
    environment = rank_environment(environ, reference_names=True, watches=True)
    if ranks.strip() != "1":
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torch does for the ranks
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
