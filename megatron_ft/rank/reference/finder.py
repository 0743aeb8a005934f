"""Import finder of a rank: ``import nvidia_resiliency_ext.fault_tolerance`` finds this package.

Only ranks and programs they start have it: the launcher asks for it in their environment, and
``startup/sitecustomize.py`` calls ``begin`` before the script's first line. No file of another package is changed.
Modules that aren't served come from the installed package itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import megatron_ft
from megatron_ft.rank.reference.served import PACKAGES, REFERENCE, SERVED, needs_memory, version_shown, why_absent

__all__ = ["begin", "say_whose"]


def begin() -> None:
    """Serve the names from now on. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def say_whose(cycle: int) -> None:
    """In the first cycle, if the script has imported the served client: print on rank 0 whose it is."""
    from megatron_ft.rank.base import say  # not before the script's first line: it imports more

    module = sys.modules.get(f"{REFERENCE}.fault_tolerance")
    if cycle == 0 and module is not None and isinstance(getattr(module.__spec__, "loader", None), _Served):
        say.note(
            f"imports of nvidia_resiliency_ext.fault_tolerance get megatron_ft {megatron_ft.__version__} "
            "(ft_launcher --ft-reference-names off: the installed package)"
        )


class _Finder:
    """Finder that serves modules itself and asks the other finders for the rest."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module for Python's import.

        Raises:
            ModuleNotFoundError: the module isn't served, and no installed package has it.
        """
        if name.partition(".")[0] != REFERENCE:
            return None
        is_served = name in SERVED and (not needs_memory(name) or importlib.util.find_spec("xxhash") is not None)
        if is_served and SERVED[name]:
            return _served(name, path)
        real = self._real(name, path, target)
        if is_served:  # a package of which only modules below it are served
            return real or _served(name, path)
        if name == REFERENCE:
            return _top(real)
        if real is None and _is_import():
            is_installed = bool(getattr(sys.modules.get(REFERENCE), "__path__", ()))
            raise ModuleNotFoundError(why_absent(name, is_installed=is_installed), name=name)
        return real

    def _real(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        found = (finder.find_spec(name, path, target) for finder in [*sys.meta_path] if finder is not self)
        return next((spec for spec in found if spec is not None), None)


def _is_import() -> bool:
    """Return True during an import; a check whether a module exists (importlib.util.find_spec) gets None."""
    # frames: this function, find_spec, importlib's search for finders, its caller
    return sys._getframe(3).f_code.co_name == "_find_and_load_unlocked"


def _served(name: str, path: Sequence[str] | None) -> ModuleSpec:
    loader: Any = _Served()
    spec = ModuleSpec(name, loader, origin=__file__, is_package=name in PACKAGES)
    if name in PACKAGES:
        folders = (os.path.join(parent, name.rpartition(".")[2]) for parent in path or ())
        # modules that aren't served are found in the package's own folders
        spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
    return spec


def _top(real: ModuleSpec | None) -> ModuleSpec:
    if real is None or real.origin is None or real.loader is None:
        # not installed; or a version without an __init__.py, which is just some folders
        folders: Any = _Folders(is_installed=real is not None)
        spec = ModuleSpec(REFERENCE, folders, is_package=True)
        spec.submodule_search_locations = list(() if real is None else real.submodule_search_locations or ())
        return spec
    real.loader = _Marked(real.loader)  # type: ignore[assignment]
    return real


class _Served:
    """Loader of a module of this package under the reference's name."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Set names of this package now, and look up names of the reference on use."""
        homes = SERVED[module.__name__]
        vars(module).update(
            __all__=[name for name, home in homes.items() if not home.startswith(REFERENCE)],
            __file__=__file__,
            __doc__=f"{module.__name__}, served by megatron_ft.",
            __getattr__=lambda name: _attribute(module.__name__, name),
        )
        for name, home in homes.items():
            if not home.startswith(REFERENCE):
                setattr(module, name, _resolved(home))


class _Folders:
    """Loader of a package that has only a path."""

    def __init__(self, *, is_installed: bool) -> None:
        self._is_installed = is_installed

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Set the version, the package's only name."""
        _mark(module, _metadata_version() if self._is_installed else None)


class _Marked:
    """Loader of the package itself, with a marked version."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Execute the package, then mark the version."""
        self._loader.exec_module(module)
        _mark(module, str(getattr(module, "__version__", "")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _mark(module: ModuleType, installed: str | None) -> None:
    vars(module)["__version__"] = version_shown(installed, megatron_ft.__version__)


def _metadata_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nvidia-resiliency-ext")
    except PackageNotFoundError:
        return None  # a checkout


def _attribute(module: str, name: str) -> Any:
    if f"{module}.{name}" in SERVED:
        return importlib.import_module(f"{module}.{name}")
    home = SERVED[module].get(name)
    if home is None:
        own = None if name.startswith("__") or module in PACKAGES else _own(module)
        if hasattr(own, name):
            return getattr(own, name)
        raise AttributeError(
            f"megatron_ft serves {module} here, which has no {name!r} (ft_launcher's --ft-reference-names off leaves "
            "the name to nvidia-resiliency-ext)"
        )
    return _resolved(home)


def _own(module: str) -> ModuleType | None:
    """Return the installed package's own module of that name: its other modules use helpers of it."""
    from importlib.util import module_from_spec, spec_from_file_location

    alias = f"{module}_of_the_package"
    if alias in sys.modules:
        return sys.modules[alias]
    package, _, last = module.rpartition(".")
    for folder in importlib.import_module(package).__path__:
        spec = spec_from_file_location(alias, os.path.join(folder, f"{last}.py"))
        if spec is not None and spec.loader is not None and spec.origin is not None and os.path.exists(spec.origin):
            found = sys.modules[alias] = module_from_spec(spec)
            try:
                spec.loader.exec_module(found)
            except BaseException:
                del sys.modules[alias]
                raise
            return found
    return None


def _resolved(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
