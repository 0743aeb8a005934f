"""``pytest -p tests.support.bridge_as_ours``: Megatron-Bridge's own tests of its fault-tolerance module get ours.

Nothing of Bridge can be imported without TransformerEngine. So the module under test, the two state classes that its
tests name, and the client that they replace are ours; of what they patch in the module, two helpers of Bridge's are
stand-ins.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.reference import finder

_TRAINING = "megatron.bridge.training"


class _WithOurClient(types.ModuleType):
    """The module that Bridge takes its client from: who replaces that there replaces ours."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "RankMonitorClient":
            vars(ft)[name] = value


def _install() -> None:
    for name in ("megatron", "megatron.bridge", _TRAINING):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__path__ = []
        owner, _, last = name.rpartition(".")
        if owner:
            setattr(sys.modules[owner], last, module)
    state: Any = types.ModuleType(f"{_TRAINING}.state")
    state.FaultToleranceState, state.GlobalState = ft.FaultToleranceState, ft.GlobalState
    for name, module in (("fault_tolerance", ft), ("state", state)):
        sys.modules[f"{_TRAINING}.{name}"] = module
        setattr(sys.modules[_TRAINING], name, module)
    vars(ft).setdefault("get_rank_safe", lambda: 0)
    vars(ft).setdefault("print_rank_0", print)
    finder.begin()
    import nvidia_resiliency_ext.fault_tolerance as reference

    reference.__class__ = _WithOurClient


_install()
