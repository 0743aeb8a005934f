"""PyTorch Lightning under its two names, ``lightning.pytorch`` and ``pytorch_lightning``.

The two packages have the same classes twice: a ``Callback`` of one is none for a ``Trainer`` of the other.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["LightningCallback", "is_tuner_exit", "names_of_classes"]

_HOMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """The ``Callback`` of the package in use; of both where that isn't known yet, so that either accepts ours.

    Raises:
        ImportError: neither can be imported.
    """
    in_use = [home for home in _HOMES if sys.modules.get(home) is not None]
    classes, reasons = [], []
    for home in in_use or _HOMES:
        try:
            classes.append(importlib.import_module(home).Callback)
        except ImportError as error:
            reasons.append(str(error))
    if not classes:
        raise ImportError(
            f"the callbacks need PyTorch Lightning: pip install 'megatron_ft[lightning]' ({'; '.join(reasons)})"
        )
    return tuple(classes)


if TYPE_CHECKING:

    class LightningCallback:
        """A ``Callback``, whichever package is used."""
else:
    LightningCallback = type("LightningCallback", _callback_classes(), {"__module__": __name__})


def names_of_classes(thing: Any) -> set[str]:
    """The names of an object's class and its bases: equal for both packages, and nothing need be imported."""
    return {each.__name__ for each in type(thing).__mro__}


def is_tuner_exit(error: BaseException | None) -> bool:
    """Whether this is how Lightning leaves a run early on purpose (tuners; NeMo's limit of the time of a run)."""
    return error is not None and "_TunerExitException" in names_of_classes(error)
