"""Starts the watch of collectives when a script makes its process group, without a change to the script.

The launcher asks for it in the environment of its ranks, and ``startup/sitecustomize.py`` calls ``begin`` before the
script's first line. ``init_process_group`` is wrapped once torch has defined it; nothing else of torch is touched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ft.rank.base.replacing import ImportHook, left_out_of_stacks

_MODULE, _NAME = "torch.distributed.distributed_c10d", "init_process_group"


def _wrap(module: ModuleType) -> None:
    _hook.end()
    init = getattr(module, _NAME, None)  # a torch without distributed has none
    if init is not None:
        setattr(module, _NAME, _watched(init))
        with contextlib.suppress(ImportError):  # reported when it is needed
            # not earlier: a script may have modules named like those that the import needs, which torch has loaded by
            # now; not later: ranks that are forked then needn't import it again
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


_hook = ImportHook(_MODULE, _wrap)
begin, end = _hook.begin, _hook.end
"""Start the watch once the process group is made; leave torch unchanged if it is imported later."""
