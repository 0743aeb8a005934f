"""Function replacements that call a hook first, used while a script is run ahead, and undone afterwards.

The code of each replacement is named ``megatron_ft_stand_in`` (see ``core.diagnosis.stacks.STAND_IN``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Hook = Callable[[Any], None]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_out_of_stacks(function: _Function) -> _Function:
    """Rename the code of a replacement function, so that no stack shows it as the place of a rank."""
    code: Any = function
    code.__code__ = code.__code__.replace(co_name="megatron_ft_stand_in")
    return function


class Replacements:
    """Replacements in modules, including modules imported later, until ``undo``.

    While hooks wait for an import, this is one of Python's finders, and finds what the others find.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any, bool]] = []
        self._kept: list[Any] = []
        """Replacements whose ``id`` is in torch.jit's table; kept alive so that no other object gets that id."""
        self._hooks: dict[str, list[Hook]] = {}
        self._class_methods: list[tuple[type, str, _ClassMethod]] = []

    def replace(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        """Call ``before`` with the arguments of each call of ``owner.name`` first. A missing function is ignored."""
        *inside, name = name.split(".")
        for each in inside:
            owner = getattr(owner, each, None)
        original = getattr(owner, name, None)
        if owner is None or original is None:
            return
        self.put(owner, name, _method(original, before) if isinstance(owner, type) else _CallsFirst(original, before))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` until ``undo``."""
        original, table = getattr(owner, name), _known_to_jit()
        if id(original) in table:
            table[id(value)] = table[id(original)]
        self._done.append((owner, name, original, value, name in vars(owner)))
        setattr(owner, name, value)

    def replace_class_method(self, owner: type, name: str, before: Callable[..., None]) -> None:
        """Like ``replace``, for a class method of a C class (``datetime.now``), which takes no attributes.

        The class stays the same object, with all references to it: its namespace is written, as ``setattr`` would.
        """
        namespace = _namespace(owner)
        if namespace is None or not hasattr(namespace.get(name), "__get__"):
            return
        standing_in = _ClassMethod(namespace[name], before)
        namespace[name] = standing_in
        _forget_lookups(owner)
        self._class_methods.append((owner, name, standing_in))

    def when_imported(self, name: str, hook: Hook) -> None:
        """Call ``hook`` with the module once it is imported, or now if it is imported already."""
        if name in sys.modules:
            hook(sys.modules[name])
            return
        self._hooks.setdefault(name, []).append(hook)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module for Python's import. The module's hooks are called once its loader has executed it."""
        if name not in self._hooks:
            return None
        # finders before this one have been asked already, other instances of this class among them
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                for hook in self._hooks[name]:
                    hook(sys.modules.get(name, module))

            with contextlib.suppress(AttributeError):  # the loader of a builtin module is a class
                loader.exec_module = exec_module
        return spec

    def undo(self) -> None:
        """Restore the originals. Replacements kept by other code now only call the original."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        table = _known_to_jit()
        for owner, name, original, standing_in, was_own in reversed(self._done):
            if isinstance(standing_in, _CallsFirst):
                standing_in.before = _nothing
            if id(standing_in) in table:
                table[id(original)] = table[id(standing_in)]
                self._kept.append(standing_in)
            if vars(owner).get(name) is not standing_in:
                continue  # the script has replaced it since
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._done.clear()
        for cls, name, class_method in self._class_methods:
            class_method.before = _nothing
            namespace = _namespace(cls)
            if namespace is not None and namespace.get(name) is class_method:
                namespace[name] = class_method.original
                _forget_lookups(cls)
        self._class_methods.clear()


def _known_to_jit() -> dict[int, Any]:
    """Return ``torch.jit``'s table of builtin functions, by ``id``."""
    return getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None) or {}


def _nothing(*_arguments: Any, **_named: Any) -> None:
    pass


class _CallsFirst:
    """Callable that runs ``before``, then a module's function. A function would become a method as a class attribute.

    Equal to the function it replaces, which may be in sets (``os.supports_dir_fd``).
    """

    def __init__(self, function: Callable[..., Any], before: Callable[..., None]) -> None:
        self.function = function
        self.before = before

    @left_out_of_stacks
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.before(*arguments, **named)
        return self.function(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == (other.function if isinstance(other, _CallsFirst) else other))

    def __hash__(self) -> int:
        return hash(self.function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __reduce__(self) -> Any:
        owner = getattr(self.function, "__self__", None)
        if not (owner is None or isinstance(owner, ModuleType)):
            return getattr, (owner, self.function.__name__)  # such as those of random: methods of a generator
        return _found, (self.function.__module__, self.function.__qualname__)


class _ClassMethod:
    """Descriptor in place of a class method in C."""

    def __init__(self, original: Any, before: Callable[..., None]) -> None:
        self.original = original
        self.before = before

    def __get__(self, instance: object, owner: type | None = None) -> _CallsFirst:
        return _CallsFirst(self.original.__get__(instance, owner), lambda *given, **named: self.before(*given, **named))


def _namespace(owner: type) -> dict[str, Any] | None:
    """Return the dictionary behind ``owner.__dict__``; None where this Python hides it."""
    found = gc.get_referents(owner.__dict__)
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else None


def _forget_lookups(owner: type) -> None:
    """Invalidate Python's attribute cache of ``owner``."""
    import ctypes  # imported late: every rank, and every Python it starts, imports this file at its start

    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def _found(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def _method(original: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    @left_out_of_stacks
    def method(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        return original(*arguments, **named)

    return method
