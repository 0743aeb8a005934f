"""State is written by its owner: in pure rooms `x.name = ...`, unless `x` is `self`, is for the file that declares it.

What another file wants changed it asks for by a method, which is where a reader looks for all that changes a name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent
ROOMS = (
    "config",
    "diagnosis",
    "diagnosis/launcher",
    "job/rules",
    "launcher/rules",
    "link/base",
    "link/facts",
    "link/messages",
    "monitor/rules",
    "records/rules",
)
PURE = [path for folder in ROOMS for path in sorted((PACKAGE / folder).glob("*.py"))]
OWN = ("self", "cls")

OWNER = """
class Node:
    phase: str = ""

    def enter(self, phase):
        self.phase = phase


def reset(node):
    node.phase = ""


class Other:
    def begin(self, node):
        node.phase = "running"
        node.enter("running")
"""


def foreign_writes(text: str) -> list[str]:
    """Assignments in a module to attributes of objects whose class, as far as names tell, is of another module."""
    tree = ast.parse(text)
    declared = {kind: set(_declared(kind)) for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef)}
    found = [f"line {at.lineno}: {ast.unparse(at)}" for at in _writes(tree) if not _is_of(at, declared)]
    return sorted(set(found))


def _is_of(write: ast.Attribute, declared: dict[ast.ClassDef, set[str]]) -> bool:
    """Whether it is a class of this module that declares the name, but not the one that the write is in itself."""
    others = (names for kind, names in declared.items() if not kind.lineno <= write.lineno <= (kind.end_lineno or 0))
    return any(write.attr in names for names in others)


def _writes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """All but those to ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not _is_own(node.value):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if not _is_own(node.args[0]):
                yield ast.Attribute(node.args[0], node.func.id, lineno=node.lineno)


def _declared(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_own(node.value):
                yield node.attr


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in OWN


def test_state_is_written_by_its_owner() -> None:
    found = {str(path.relative_to(PACKAGE)): foreign_writes(path.read_text()) for path in PURE}
    assert len(found) > 90
    assert {path: writes for path, writes in found.items() if writes} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "def go_on(self, node):\n    node.link = None",
        "def go_on(self, node):\n    self._node.link = None",
        "def go_on(self, nodes):\n    nodes[0].count += 1",
        "def go_on(self, node):\n    node.link, here = None, True",
        "def go_on(self, node):\n    here = node.link = None",
        "def go_on(self, nodes):\n    for nodes.last in nodes: pass",
        "def go_on(self, node):\n    del node.link",
        "def go_on(self, node):\n    setattr(node, 'link', None)",
        "class Mine:\n    def __init__(self, other):\n        self.leads = True\n        other.leads = False",
    ],
)
def test_a_write_to_another_files_object_is_found(planted: str) -> None:
    assert len(foreign_writes(OWNER + "\n" + planted)) == 1
