"""Unit tests start no process and don't sleep; the second half plants violations."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

UNIT = Path(__file__).parent.parent
ALLOWED = {"house/fresh_interpreter.py": "only a fresh interpreter can tell what an import loads"}
HELPER = "tests.unit.house.fresh_interpreter"
MODULES = ("multiprocessing", "subprocess", HELPER)
STARTS = ("fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system")
CALLS = {**dict.fromkeys(STARTS, "os"), "sleep": "time"}


def violations(text: str) -> list[str]:
    """What a module of unit tests has that it may not, each with its line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: imports {alias.name}" for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(f"{node.lineno}: imports {node.module}")
        elif isinstance(node, ast.ImportFrom):
            taken = [alias.name for alias in node.names if CALLS.get(alias.name) == node.module]
            found += [f"{node.lineno}: imports {node.module}.{name}" for name in taken]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            if CALLS.get(name) == owner:
                found.append(f"{node.lineno}: calls {owner}.{name}")
    return found


def test_unit_tests_start_no_process_and_do_not_sleep() -> None:
    found = {}
    for path in sorted(UNIT.rglob("*.py")):
        relative = path.relative_to(UNIT)
        if str(relative) not in ALLOWED:
            lines = violations(path.read_text())
            found[str(relative)] = [each for each in lines if relative.parts[0] != "house" or HELPER not in each]
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_allowed_exceptions_are_still_needed() -> None:
    assert [name for name in ALLOWED if not violations((UNIT / name).read_text())] == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import subprocess", "1: imports subprocess"),
        ("def f():\n    import multiprocessing as mp", "2: imports multiprocessing"),
        ("from subprocess import run", "1: imports subprocess"),
        ("import os\nos.fork()", "2: calls os.fork"),
        ("import os\nif os.posix_spawn('/bin/true', [], {}): pass", "2: calls os.posix_spawn"),
        ("import time\ndef f():\n    time.sleep(0.5)", "3: calls time.sleep"),
        ("from time import monotonic, sleep", "1: imports time.sleep"),
        ("from tests.unit.house.fresh_interpreter import output_of", "1: imports tests.unit.house.fresh_interpreter"),
    ],
)
def test_a_planted_violation_is_found(code: str, words: str) -> None:
    assert violations(code) == [words]
