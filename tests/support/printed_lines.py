"""The lines that launchers, ranks and the coordinator can print, as found in the code.

`python -m tests.support.printed_lines` writes them to `tests/data/printed_lines.txt`: a changed line is one diff.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests import ROOT

PACKAGE = ROOT / "megatron_ft"
GOLDEN = ROOT / "tests" / "data" / "printed_lines.txt"
LINES = (
    "launcher/rules/cycle_lines.py",
    "job/rules/job_lines.py",
    "job/rules/admission.py",
    "job/rules/announcements.py",
    "job/rules/coordinator.py",
    "job/rules/job_cycle.py",
    "job/rules/member.py",
    "job/rules/next_cycle.py",
    "job/rules/restart_policy.py",
    "launcher/base/launcher_lines.py",
    "memory/rules/lines.py",
)
"""Files whose functions format lines, or parts of them."""
_FOLDERS = (
    "diagnosis/launcher",
    "launcher",
    "run_ahead",
    "learning",
    "job",
    "memory/keeper",
    "memory/launcher",
    "memory/rank",
    "records",
    "monitor",
    "rank",
    "config/files",
    "link/files",
    "launcher/rules",
)
_LOOSE = ("fault_tolerance.py", "memory_checkpoint.py", "integrations/megatron_lm.py")
_CALLS = re.compile(r"_?(say|warn)(_\w+)?|note|put|_over")
"""Functions that print their argument; and ``warnings.append``, whose lines are printed at the start."""
_CUTS = ("removesuffix", "partition", "strftime")
"""Methods whose arguments aren't printed."""
_SHORTEST = 12
VALUE = "{}"
_TRIM = " ;:,.()'"


def printed_lines() -> dict[str, str]:
    """Return the longest fixed part of each line, and where it is made. Shorter texts are parts of other lines."""
    found: dict[str, str] = {}
    for nodes, where in _places():
        parts = [text for node in nodes for template in _templates(node) for text in template.split(VALUE)]
        longest = max((" ".join(text.split()).strip(_TRIM) for text in parts), key=len, default="")
        if _is_line(longest):
            found[longest] = where
    return found


def golden() -> str:
    """Return the templates of all lines, each once, for `tests/data/printed_lines.txt`."""
    texts = {" ".join(text.split()) for nodes, _ in _places() for node in nodes for text in _templates(node)}
    return "".join(f"{text}\n" for text in sorted(texts) if _is_line(text))


def _is_line(text: str) -> bool:
    return len(text) >= _SHORTEST and " " in text


def _places() -> Iterator[tuple[Sequence[ast.AST], str]]:
    for name in LINES:
        module = ast.parse((PACKAGE / name).read_text())
        yield from (([node], name) for node in module.body if isinstance(node, ast.Assign))
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                yield node.body, f"{name}: {node.name}"
    files = [path for folder in _FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    for path in (*files, *(PACKAGE / name for name in _LOOSE)):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and _prints(call.func):
                yield call.args, f"{path.relative_to(PACKAGE)}:{call.lineno}"


def _prints(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return _CALLS.fullmatch(function.id) is not None
    if not isinstance(function, ast.Attribute):
        return False
    return _CALLS.fullmatch(function.attr) is not None or ast.unparse(function).endswith("warnings.append")


def _templates(node: ast.AST) -> Iterator[str]:
    """Yield the strings below a node that aren't docstrings, with `VALUE` for what is formatted into them."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CUTS:
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _templates(part.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _templates(child)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden())
