"""PyTorch Lightning under its two names, ``lightning.pytorch`` and ``pytorch_lightning``.

The two packages have separate copies of the same classes: a ``Callback`` of one is none for a ``Trainer`` of the other.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_HOMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Return the ``Callback`` class of the package in use; of both if unknown, so that either accepts ours.

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
        """A ``Callback`` of whichever package is used."""
else:
    LightningCallback = type("LightningCallback", _callback_classes(), {"__module__": __name__})


def names_of_classes(thing: Any) -> set[str]:
    """Return the names of an object's class and bases: equal for both packages, without an import."""
    return {each.__name__ for each in type(thing).__mro__}
