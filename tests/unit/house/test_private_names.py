"""Tests reach into private attributes of the package's objects at most so often; the number only goes down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT

BUDGET = 140
"""Uses in all of tests/. Lower it with each use that goes."""
OF_PYTHON = ("_replace", "_fields", "_asdict", "_make", "_field_defaults", "_exit")
"""Public names that begin with an underscore: those of named tuples, and `os._exit`."""
BY_NAME = ("setattr", "getattr", "delattr", "hasattr")


def private_uses(text: str) -> Iterator[str]:
    """Yield each private attribute of another object that a module reads, sets or patches."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            if _is_private(node.attr):
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
            names = [str(each.value).rpartition(".")[2] for each in node.args if isinstance(each, ast.Constant)]
            yield from filter(_is_private, names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_PYTHON


def test_private_attributes_are_used_within_the_budget() -> None:
    found = [use for path in sorted((ROOT / "tests").rglob("*.py")) for use in private_uses(path.read_text())]
    assert len(found) <= BUDGET, "test by the public call, or lower another use"


def test_each_way_to_a_private_attribute_is_found() -> None:
    planted = "x._a\nx.y._b = 1\nmonkeypatch.setattr(x, '_c', 1)\nmonkeypatch.setattr('m.x._d', 1)\nx._e()"
    assert list(private_uses(planted)) == ["_a", "_b", "_c", "_d", "_e"]
    assert list(private_uses("self._a\nx.__dict__\nx._replace(b=1)\nos._exit(0)")) == []
