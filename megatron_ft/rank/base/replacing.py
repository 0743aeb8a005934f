"""Functions of this package in the place of others, and a hook on the import of one module.

The code of each replacement is named ``megatron_ft_stand_in`` (see ``diagnosis.stacks.STAND_IN``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_out_of_stacks(function: _Function) -> _Function:
    """Rename the code of a replacement function, so that no stack shows it as the place of a rank."""
    code: Any = function
    code.__code__ = code.__code__.replace(co_name="megatron_ft_stand_in")
    return function


def found_by_others(finder: Any, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return what the finders after this one find; those before it have been asked already."""
    others = sys.meta_path[sys.meta_path.index(finder) + 1 :]
    found = (other.find_spec(name, path, target) for other in others)
    return next((spec for spec in found if spec is not None), None)


class ImportHook:
    """One of Python's finders, which finds what the others find, and calls a function once a module is imported."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name = name
        self._function = function

    def begin(self) -> None:
        """Call the function once the module is imported, or now if it is. Idempotent."""
        if self._name in sys.modules:
            self._function(sys.modules[self._name])
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Find nothing any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module for Python's import. The function is called once its loader has executed it."""
        if name != self._name:
            return None
        spec = found_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                self._function(sys.modules.get(name, module))

            with contextlib.suppress(AttributeError):  # the loader of a builtin module is a class
                loader.exec_module = exec_module
        return spec
