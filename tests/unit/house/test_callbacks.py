"""A callback is an argument of a constructor: no file fills an attribute of another file's object with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import megatron_ft
from tests.unit.house.test_owners import OWN

PACKAGE = Path(megatron_ft.__file__).parent

DECLARES = """
class Timer:
    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.ring: Callable[[], None] | None = None
        self.seconds = 0.0


@dataclass
class Worker:
    on_exit: Callable[[int], None]
"""


def late_bound(texts: Mapping[str, str]) -> list[str]:
    """Return the assignments to callbacks of other objects, and public attributes that a lambda holds the place for."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    callbacks = {attribute for tree in trees.values() for attribute in _callbacks(tree)}
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if _fills(node, callbacks) or _holds_a_place(node)
    ]


def _callbacks(tree: ast.AST) -> Iterator[str]:
    """Attributes that are declared as callables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in ast.walk(node):
                if isinstance(each, ast.AnnAssign) and "Callable[" in ast.unparse(each.annotation):
                    if isinstance(each.target, ast.Name):
                        yield each.target.id
                    elif isinstance(each.target, ast.Attribute):
                        yield each.target.attr


def _fills(node: ast.AST, callbacks: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        target, name = node.args[0], node.args[1]
        is_callback = isinstance(name, ast.Constant) and _is_callback(str(name.value), callbacks)
        return is_callback and not _is_own(target)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return _is_callback(node.attr, callbacks) and not _is_own(node.value)
    return False


def _is_callback(name: str, callbacks: set[str]) -> bool:
    return name in callbacks or name.startswith("on_")


def _holds_a_place(node: ast.AST) -> bool:
    """Return True for ``self.name = lambda ...`` with a public name."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(
            isinstance(target, ast.Attribute) and _is_own(target.value) and not target.attr.startswith("_")
            for target in targets
        )
    return False


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in OWN


def test_callbacks_are_not_filled_in_from_outside() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(texts) > 300
    assert late_bound(texts) == []


@pytest.mark.parametrize(
    "planted",
    [
        "def assemble(timer):\n    timer.on_ring = print",
        "def assemble(timer):\n    timer.ring = print",
        "def assemble(node):\n    node.timer.ring, node.count = print, 1",
        "def assemble(worker):\n    setattr(worker, 'on_exit', print)",
        "class Agent:\n    def __init__(self, worker):\n        worker.on_exit = self.ended",
        "class Monitors:\n    def __init__(self):\n        self.check: Callable[[], None] = lambda: None",
        "class Monitors:\n    def __init__(self):\n        self.check = lambda: None",
    ],
)
def test_planted_slot_is_found(planted: str) -> None:
    assert len(late_bound({"timer.py": DECLARES, "planted.py": planted})) == 1


def test_constructor_argument_is_no_finding() -> None:
    assert late_bound({"timer.py": DECLARES, "other.py": "def reset(timer):\n    timer.seconds = 1.0"}) == []
