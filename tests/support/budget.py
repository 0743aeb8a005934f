"""Size of each room of the package against its budget: ``python -m tests.support.budget`` lowers what has shrunk."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import megatron_ft

__all__ = ["PATH", "budget", "exceeded", "sizes"]

PATH = Path(__file__).parents[1] / "unit" / "house" / "budget.toml"
_HEAD = """\
# room = [lines, statements]: the most that a folder of megatron_ft may have; docstrings are no statements.
# The budget only goes down: `python -m tests.support.budget` lowers the rows of rooms that have shrunk.
"""
_TOP = "(top)"

Sizes = Mapping[str, tuple[int, int]]


def sizes(root: Path = Path(megatron_ft.__file__).parent) -> dict[str, tuple[int, int]]:
    """Return lines and statements of each folder of the package, and of the files beside them."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(root.rglob("*.py")):
        room, *rest = path.relative_to(root).parts
        lines, statements = found.get(room if rest else _TOP, (0, 0))
        text = path.read_text()
        inner = sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(text)))
        found[room if rest else _TOP] = lines + text.count("\n"), statements + inner
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def budget() -> dict[str, tuple[int, int]]:
    """Return the rows of the file."""
    rows = re.findall(r'^"([^"]+)" = \[(\d+), (\d+)\]$', PATH.read_text(), flags=re.M)
    return {room: (int(lines), int(statements)) for room, lines, statements in rows}


def exceeded(now: Sizes, most: Sizes) -> Iterator[str]:
    """Yield a line for each room that is larger than its row, or has none."""
    for room, size in now.items():
        for what, count, allowed in zip(("lines", "statements"), size, most.get(room, (0, 0)), strict=True):
            if count > allowed:
                yield f"{room} has {count} {what}, {count - allowed} more than its budget of {allowed}"


if __name__ == "__main__":
    old = budget()
    new = {room: tuple(map(min, size, old.get(room, size))) for room, size in sizes().items()}
    rows = (f'"{room}" = {list(row)}\n' for room, row in sorted(new.items()))
    PATH.write_text(_HEAD + "".join(rows))
