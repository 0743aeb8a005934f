"""A state as a tree of plain values for a segment's head, in which tensors are numbers; and back.

A dict is a map; None, bool, float, str, bytes, and ints of 64 bits are themselves. Everything else is a list that
begins with its kind. Nothing is unpickled, and no module is imported: an enum or a namedtuple comes back as its own
class if the script has imported that, otherwise as the plain value that equals it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import Any

from megatron_ft.core.errors import LayoutError, SnapshotError
from megatron_ft.core.wording import shown
from megatron_ft.memory.rules.segment_layout import Path, name_of

TENSOR = "tensor"
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


class UnfitError(SnapshotError):
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
        UnfitError: the state has a value that can't be kept.
    """
    if not isinstance(state, dict):
        raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
    tensors: list[Any] = []
    return _Writer(tensors, carefully).node(state, 0), tensors


class _Writer:
    def __init__(self, tensors: list[Any], carefully: bool) -> None:
        self._tensors = tensors
        self._carefully = carefully

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return self._checked(value) if self._carefully else value
        if is_tensor(value):
            number = len(self._tensors)
            self._tensors.append(value)
            if number == len(_TENSOR_NODES):
                _TENSOR_NODES.append([TENSOR, number])
            return _TENSOR_NODES[number]
        if depth >= _MAX_DEPTH:
            raise UnfitError(f"is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            if not _KEYS.issuperset(map(type, value)):
                strange = next(type(key).__name__ for key in value if type(key) not in _KEYS)
                raise UnfitError(f"has a key of type {strange}: use str or int")
            keys = list(map(self._checked, value)) if self._carefully else value
            if self._carefully and any(type(key) is list for key in keys):
                raise UnfitError("has an int of more than 64 bits as a key")
            return dict(zip(keys, self._nodes(value.items(), depth), strict=True))
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
        raise UnfitError(f"is of type {kind.__name__}; a state holds {kinds}")

    def _items(self, values: Any, depth: int) -> Any:
        if _SCALARS.issuperset(map(type, values)) and not self._carefully:
            return values  # a million numbers are not looked at one by one
        return self._nodes(enumerate(values), depth)

    def _nodes(self, items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
        nodes = []
        for key, item in items:
            try:
                nodes.append(self.node(item, depth + 1))
            except UnfitError as error:
                error.path.insert(0, key)
                raise
        return nodes

    @staticmethod
    def _checked(value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            if value.bit_length() > 3 * _MAX_INT_DIGITS:
                raise UnfitError("is an int of too many digits")
            return ["int", str(value)]
        if type(value) is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UnfitError("is or has a string with a lone surrogate, which UTF-8 can't hold") from None
        return value


# -- back ---------------------------------------------------------------------------------------------------------


def check(tree: Any, tensors: int) -> None:
    """Check a tree in full.

    Raises:
        LayoutError: it is malformed, or has another number of tensors.
    """
    found: list[int] = []
    if type(tree) is not dict:
        raise LayoutError("the layout has no state")
    _check(tree, found, ())
    if found != list(range(tensors)):
        raise LayoutError("the layout lists other tensors than its state has")


def _check(node: Any, found: list[int], path: Path) -> None:
    if type(node) in _SCALARS or _is_leaf(node):
        return
    items: Any = None
    if type(node) is dict and _KEYS.issuperset(map(type, node)):
        items = node.items()
    else:
        match node:
            case [kind, int(index)] if kind == TENSOR:
                found.append(index)
                return
            case (["list" | "tuple", list(held)]) | (["namedtuple", str(), str(), list(held)]):
                items = enumerate(held)
    if items is None or len(path) > _MAX_DEPTH:
        raise LayoutError(f"{name_of(path)} is malformed: {shown(node)}")
    for key, item in items:
        if type(item) not in _SCALARS:
            _check(item, found, (*path, key))


def _is_leaf(node: Any) -> bool:
    """Return True for a value of its own kind that holds no other."""
    match node:
        case ["int", str(text)]:
            return len(text) <= _MAX_INT_DIGITS and text.removeprefix("-").isdecimal()
        case ["Size", list(sizes)]:
            return all(type(each) is int for each in sizes)
        case ["enum", str(), str(), int() | str()]:
            return True
        case ["numpy", str(dtype), bytes()]:
            return dtype[1:2] in _NUMPY_KINDS
    return False


def plain(node: Any, items: list[Any] | None = None) -> Any:
    """Return the value of a node that is neither a dict nor a tensor; ``items``: values of what it holds.

    Raises:
        LayoutError: a value isn't one of its kind.
    """
    if type(node) is not list:
        return node
    try:
        match node:
            case ["list", _]:
                return items
            case ["tuple", _]:
                return tuple(items or ())
            case ["namedtuple", module, name, _]:
                kind: Any = _imported(module, name)
                values = tuple(items or ())
                is_it = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
                return kind._make(values) if is_it else values
            case ["int", text]:
                return int(text)
            case ["Size", sizes]:
                import torch

                return torch.Size(sizes)
            case ["enum", module, name, value]:
                kind = _imported(module, name)
                return kind(value) if isinstance(kind, type) and issubclass(kind, enum.Enum) else value
            case ["numpy", dtype, raw]:
                numpy: Any = sys.modules["numpy"]  # torch has imported it
                return numpy.frombuffer(raw, numpy.dtype(dtype))[0]
    except (ValueError, TypeError, LookupError) as error:
        raise LayoutError(f"a {node[0]} of the state can't be had: {error}") from None
    raise AssertionError(node)


def _imported(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
