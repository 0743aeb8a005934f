"""The lines that launchers, ranks and the coordinator can print, as found in the code: the fixed part of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests import ROOT

PACKAGE = ROOT / "megatron_ft"
LINES = ("core/agent/lines.py", "core/job/lines.py", "launcher/base/lines.py")
"""Files whose functions each format a line, or a part of one."""
_FOLDERS = ("launcher", "coordinator", "monitor", "rank", "ipc/config", "ipc/files", "core/agent", "core/job")
_LOOSE = ("fault_tolerance.py", "memory_checkpoint.py", "integrations/megatron_lm.py")
_CALLS = re.compile(r"_?(say|warn)(_\w+)?|note|put")
"""Functions that print their argument; and ``warnings.append``, whose lines are printed at the start."""
_CUTS = ("removesuffix", "partition", "strftime")
"""Methods whose arguments aren't printed."""
_SHORTEST = 12
_TRIM = " ;:,.()'"


def printed_lines() -> dict[str, str]:
    """Return the longest fixed part of each line, and where it is made. Shorter texts are parts of other lines."""
    found: dict[str, str] = {}
    for name in LINES:
        for node in ast.parse((PACKAGE / name).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found |= _longest(node.body, f"{name}: {node.name}")
            elif isinstance(node, ast.Assign):
                found |= _longest([node], name)
    files = [path for folder in _FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    for path in (*files, *(PACKAGE / name for name in _LOOSE)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _prints(node.func):
                found |= _longest(node.args, f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def _prints(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return _CALLS.fullmatch(function.id) is not None
    if not isinstance(function, ast.Attribute):
        return False
    return _CALLS.fullmatch(function.attr) is not None or ast.unparse(function).endswith("warnings.append")


def _longest(nodes: list[ast.stmt] | list[ast.expr], where: str) -> dict[str, str]:
    texts = [" ".join(text.split()).strip(_TRIM) for node in nodes for text in _strings(node)]
    longest = max(texts, key=len, default="")
    return {longest: where} if len(longest) >= _SHORTEST and " " in longest else {}


def _strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings below a node that aren't docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CUTS:
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)
