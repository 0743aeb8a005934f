"""Import finder of a rank: ``import nvidia_resiliency_ext.fault_tolerance`` finds this package.

Only ranks and programs they start have it: the launcher asks for it in their environment, and
``startup/sitecustomize.py`` calls ``begin`` before the script's first line. No file of another package is changed.
Modules that aren't served come from the installed package itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import megatron_ft
from megatron_ft.rank.base.replacing import ImportHook, found_by_others
from megatron_ft.rank.reference.served import PACKAGES, REFERENCE, SERVED, needs_memory, version_shown, why_absent


def begin() -> None:
    """Serve the names from now on. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        ImportHook(REFERENCE, _mark).begin()


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
            return _served(name, [os.path.join(parent, name.rpartition(".")[2]) for parent in path or ()])
        real = found_by_others(self, name, path, target)
        if is_served and (real is None or real.loader is None):
            # only modules below this package are served; it isn't installed, or is just a folder
            return _served(name, None if real is None else real.submodule_search_locations)
        # a check whether a module exists (importlib.util.find_spec) gets None; the frame of an import is below that of
        # importlib's search for finders
        if real is None and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            is_installed = bool(getattr(sys.modules.get(REFERENCE), "__path__", ()))
            raise ModuleNotFoundError(why_absent(name, is_installed=is_installed), name=name)
        return real


def _served(name: str, folders: Sequence[str] | None) -> ModuleSpec:
    """Return the spec of a served module; modules of a package that aren't served are found in these folders."""
    loader: Any = _Served()
    spec = ModuleSpec(name, loader, origin=__file__, is_package=name in PACKAGES)
    if name in PACKAGES:
        spec.submodule_search_locations = [folder for folder in folders or () if os.path.isdir(folder)]
    return spec


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


def _mark(module: ModuleType) -> None:
    """Set the version of the package: the installed one's with a mark, or ours."""
    installed = vars(module).get("__version__")
    if installed is None:
        from importlib.metadata import PackageNotFoundError, version

        with contextlib.suppress(PackageNotFoundError):  # not installed, or a checkout
            installed = version("nvidia-resiliency-ext")
    vars(module)["__version__"] = version_shown(installed, megatron_ft.__version__)


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
