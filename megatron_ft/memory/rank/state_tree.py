"""A state as a tree of plain values for a segment's head, in which tensors are numbers; and back.

A dict is a map; None, bool, float, str, bytes, and ints of 64 bits are themselves. Everything else is a list that
begins with its kind. Nothing is unpickled, and no module is imported: an enum or a namedtuple comes back as its own
class if the script has imported that, otherwise as the plain value that equals it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from megatron_ft.errors import LayoutError, SnapshotError
from megatron_ft.link.base.wording import shown
from megatron_ft.memory.rules.segment_layout import Path, name_of

_TENSOR = "tensor"
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_KEYS = frozenset((str, int))
_TENSOR_NODES: list[list[Any]] = []
"""Kept: new ones for many tensors would have Python's garbage collector look at all that the script has."""
_MAX_DEPTH = 64
_MAX_INT_DIGITS = 4000
_NUMPY_KINDS = "biufc"


def is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class _UnfitError(SnapshotError):
    """Raised for a value that can't be kept. ``path`` is completed on the way up."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.path = text, list[str | int]()

    def __str__(self) -> str:
        return f"{name_of(tuple(self.path))} {self.text}"


def take_apart(state: object, *, carefully: bool = False) -> tuple[Any, list[Any]]:
    """Return the tree of a state, and its tensors by number.

    ``carefully``: look at each int and string. Without that a tree may come out that can't be encoded.

    Raises:
        SnapshotError: the state has a value that can't be kept.
    """
    if not isinstance(state, dict):
        raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
    tensors: list[Any] = []
    return _Writer(tensors, carefully).node(state, 0), tensors


class _Writer:
    def __init__(self, tensors: list[Any], carefully: bool) -> None:
        self._tensors = tensors
        self._carefully = carefully
        torch: Any = sys.modules.get("torch")
        self._tensor_kinds = frozenset() if torch is None else frozenset((torch.Tensor, torch.nn.Parameter))

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return self._checked(value) if self._carefully else value
        if is_tensor(value):
            return self._tensor_nodes([value])[0]
        if depth >= _MAX_DEPTH:
            raise _UnfitError(f"is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            if not _KEYS.issuperset(map(type, value)):
                strange = next(type(key).__name__ for key in value if type(key) not in _KEYS)
                raise _UnfitError(f"has a key of type {strange}: use str or int")
            keys = list(map(self._checked, value)) if self._carefully else value
            if self._carefully and any(type(key) is list for key in keys):
                raise _UnfitError("has an int of more than 64 bits as a key")
            return dict(zip(keys, self._nodes(value, value.values(), depth), strict=True))
        if kind is list or kind is tuple:
            return [kind.__name__, self._items(value, depth)]
        return self._special(value, kind, depth)

    def _special(self, value: Any, kind: Any, depth: int) -> Any:
        if isinstance(value, tuple) and kind.__name__ == "Size" and kind.__module__ == "torch":
            return ["Size", list(value)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["namedtuple", kind.__module__, kind.__qualname__, self._items(value, depth)]
        if isinstance(value, enum.Enum) and isinstance(value, (int, str)):
            plain: Any = int(value) if isinstance(value, int) else str(value.value)
            return ["enum", kind.__module__, kind.__qualname__, self._checked(plain)]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
            return ["numpy", value.dtype.str, value.tobytes()]
        kinds = "tensors, numbers, strings, bytes, None, and dicts, lists and tuples of them"
        raise _UnfitError(f"is of type {kind.__name__}; a state holds {kinds}")

    def _items(self, values: Any, depth: int) -> Any:
        if _SCALARS.issuperset(map(type, values)) and not self._carefully:
            return values  # a million numbers are not looked at one by one
        return self._nodes(range(len(values)), values, depth)

    def _tensor_nodes(self, tensors: Collection[Any]) -> list[list[Any]]:
        first = len(self._tensors)
        self._tensors += tensors
        _TENSOR_NODES.extend([_TENSOR, number] for number in range(len(_TENSOR_NODES), len(self._tensors)))
        return _TENSOR_NODES[first : len(self._tensors)]

    def _nodes(self, keys: Iterable[Any], values: Collection[Any], depth: int) -> list[Any]:
        if self._tensor_kinds.issuperset(map(type, values)):  # nor are thousands of tensors
            return self._tensor_nodes(values)
        nodes = []
        for key, item in zip(keys, values, strict=True):
            try:
                nodes.append(self.node(item, depth + 1))
            except _UnfitError as error:
                error.path.insert(0, key)
                raise
        return nodes

    @staticmethod
    def _checked(value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            if value.bit_length() > 3 * _MAX_INT_DIGITS:
                raise _UnfitError("is an int of too many digits")
            return ["int", str(value)]
        if type(value) is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _UnfitError("is or has a string with a lone surrogate, which UTF-8 can't hold") from None
        return value


# -- back ---------------------------------------------------------------------------------------------------------


def put(target: Any, node: Any, place: Callable[[Any, int, Path], Any], path: Path = ()) -> Any:
    """Return what takes the place of ``target``, a part of the caller's state: the same object if it can be changed.

    ``place`` is given the target, the number and the path of a tensor, and returns the tensor for its place.
    """
    match node:
        case [kind, int(number)] if kind == _TENSOR:
            return place(target, number, path)
        case dict() if _KEYS.issuperset(map(type, node)) and len(path) <= _MAX_DEPTH:
            into = target if isinstance(target, dict) else _without_tensors({}, target, node, path)
            missing = [key for key in into if key not in node]
            if missing:
                raise SnapshotError(f"{name_of((*path, missing[0]))} was not saved")
            for key, item in node.items():
                into[key] = put(into.get(key), item, place, (*path, key))
            return into
        case ["list" | "tuple" | "namedtuple", *_, list(held)] if len(path) <= _MAX_DEPTH:
            is_same = isinstance(target, (list, tuple)) and len(target) == len(held)
            if not is_same or _SCALARS.issuperset(map(type, held)):
                _without_tensors(None, target, node, path)
            items = held
            if not _SCALARS.issuperset(map(type, held)):  # a million numbers are not looked at one by one
                given = target if is_same else [None] * len(held)
                items = [put(given[at], item, place, (*path, at)) for at, item in enumerate(held)]
            if node[0] == "list" and type(target) is list:
                target[:] = items
                return target
            return _value(node, path, items)
    return _without_tensors(_value(node, path), target, node, path)


def _without_tensors(value: Any, target: Any, node: Any, path: Path) -> Any:
    """Return ``value`` for a target whose tensors would be lost otherwise: it must have none."""
    if is_tensor(target):
        saved = node[0] if type(node) is list else type(node).__name__
        raise SnapshotError(f"{name_of(path)} is a tensor, but {saved} was saved")
    if _has_tensor(target):
        raise SnapshotError(f"{name_of(path)} has another structure than what was saved")
    return value


def _has_tensor(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return not _SCALARS.issuperset(map(type, items)) and any(map(_has_tensor, items))  # type: ignore[call-overload]
    return is_tensor(value)


def _value(node: Any, path: Path, items: Iterable[Any] = ()) -> Any:
    """Return the value of a node that is no dict; ``items``: values of what it holds."""
    if type(node) in _SCALARS:
        return node
    try:
        match node:
            case ["list", list()]:
                return items
            case ["tuple", list()]:
                return tuple(items)
            case ["namedtuple", str(module), str(name), list()]:
                kind: Any = _imported(module, name)
                is_it = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
                return kind._make(items) if is_it else tuple(items)
            case ["int", str(text)] if len(text) <= _MAX_INT_DIGITS:
                return int(text)
            case ["Size", list(sizes)]:
                import torch

                return torch.Size(sizes)
            case ["enum", str(module), str(name), (int() | str()) as value]:
                kind = _imported(module, name)
                return kind(value) if isinstance(kind, type) and issubclass(kind, enum.Enum) else value
            case ["numpy", str(dtype), bytes(raw)] if dtype[1:2] in _NUMPY_KINDS:
                numpy: Any = sys.modules["numpy"]  # torch has imported it
                return numpy.frombuffer(raw, numpy.dtype(dtype))[0]
    except (ValueError, TypeError, LookupError) as error:
        raise LayoutError(f"{name_of(path)}, a {node[0]}, can't be had: {error}") from None
    raise LayoutError(f"{name_of(path)} is malformed: {shown(node)}")


def _imported(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
