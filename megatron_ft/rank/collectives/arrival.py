"""Begins the watch of a script's collectives when it makes its process group, without a change to the script.

The launcher says so in the environment of its ranks, and ``startup/sitecustomize.py`` calls ``begin`` before the
script's first line. ``init_process_group`` is wrapped when torch has defined it; nothing else of torch is touched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from megatron_ft.core.run_ahead import WATCH_VARIABLE
from megatron_ft.rank.base.replacing import Replacements, left_out_of_stacks

_MODULE, _NAME = "torch.distributed.distributed_c10d", "init_process_group"
_imports = Replacements()


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether a rank with these variables is to be watched; one that is alone waits for no other."""
    return environ.get(WATCH_VARIABLE) == "on" and environ.get("WORLD_SIZE", "1") != "1"


def begin() -> None:
    """Watch this process from the moment its process group is made, by whatever code; calling it again does nothing."""
    if _imports not in sys.meta_path:
        _imports.when_imported(_MODULE, _wrap)


def end() -> None:
    """Don't watch after all: a module that is imported later is left as it is."""
    if _imports in sys.meta_path:
        sys.meta_path.remove(_imports)


def _wrap(module: ModuleType) -> None:
    end()
    init = getattr(module, _NAME, None)  # a torch without distributed has none
    if init is not None:
        setattr(module, _NAME, _watched(init))
        with contextlib.suppress(ImportError):  # reported when it is needed
            # not before: a script may have modules named like those it needs, which torch has by now; and not later:
            # what a script that is run ahead has imported, its ranks needn't
            importlib.import_module("megatron_ft.rank.collectives.watch")


def _watched(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    @left_out_of_stacks
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        made = init(*arguments, **named)
        try:
            importlib.import_module("megatron_ft.rank.collectives.watch").begin()
        except Exception as error:  # noqa: BLE001 - whatever it is: no script may fail because it can't be watched
            sys.stderr.write(f"FT: WARNING: the collectives of this rank aren't watched: {error!r}\n")
        return made

    return init_process_group
