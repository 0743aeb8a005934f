"""Generators that a process has once belong to the program: in a rank, a draw of ours would change what it draws.

ruff's NPY002 finds those of numpy.
"""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent
OWN = {"Random", "SystemRandom"}


def draws_of_the_program(code: str) -> list[int]:
    """Return the lines that use a function of the module ``random``, which draws from the generator that all share."""
    tree = ast.parse(code)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "random"
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "random" and node.level == 0:
            found += [node.lineno] if {alias.name for alias in node.names} - OWN else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found += [node.lineno] if node.attr not in OWN else []
    return found


def test_package_has_generators_of_its_own() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert [(str(path), line) for path in paths for line in draws_of_the_program(path.read_text())] == []
