"""docs/api.md, made from the docstrings of the public names: ``python -m tests.support.api_page``. Imports nothing."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PAGE = ROOT / "docs" / "api.md"
MODULES = (
    "megatron_ft",
    "megatron_ft.fault_tolerance",
    "megatron_ft.memory_checkpoint",
    "megatron_ft.integrations.megatron_lm",
    "megatron_ft.integrations.lightning",
)
_HEAD = """\
# Python API

This page is made from the docstrings; `python -m tests.support.api_page` writes it anew. What may change between
versions is in [compatibility.md](compatibility.md).
"""
_SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:")
_Node = ast.ClassDef | ast.FunctionDef


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for module in MODULES:
        parts.append(f"## {module}\n\n{prose(ast.get_docstring(_tree(module)) or '')}")
        for name in public_names(module):
            node = _find(module, name)
            if node is not None and not (module.endswith("megatron_lm") and name.startswith("on_")):
                parts += _entry(node, 3)
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(part.strip("\n") for part in parts)) + "\n"


def public_names(module: str) -> list[str]:
    """Return the names in a module's ``__all__``, without special ones."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    raise AssertionError(f"{module} has no __all__")


def prose(docstring: str) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring).replace("``", "`")
    text = re.sub(r"\s*::\n", ":\n", text)
    text = re.sub(r"(?:^[=].*\n)(?:.+\n)+^[=].*$", lambda table: textwrap.indent(table[0], "    "), text, flags=re.M)
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.strip() in _SECTIONS:
            section = line.strip()
            lines += ["", f"{section}" if section != "Args:" else "", ""]
        elif section and line.strip():
            begins = bool(re.match(r"\s+[\w, ]+: ", line)) or lines[-1] == ""
            text = re.sub(r"^([\w, ]+): ", r"`\1`: ", line.strip()) if begins else line.strip()
            lines.append(f"- {text}" if begins else f"  {text}")
        else:
            section = "" if line[:1].strip() else section
            lines.append(line)
    return "\n".join(lines)


def _entry(node: _Node, level: int) -> Iterator[str]:
    kind = "class " if isinstance(node, ast.ClassDef) else ""
    yield f"{'#' * level} `{kind}{node.name}{_signature(node).removesuffix(' -> None')}`"
    yield prose(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            is_public = isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
            if is_public and ast.get_docstring(each) and not node.name.endswith("Timeouts"):
                yield from _entry(each, level + 1)


def _signature(node: _Node) -> str:
    if isinstance(node, ast.FunctionDef):
        arguments = [each for each in node.args.args if each.arg not in ("self", "cls")]
        shown = ast.unparse(ast.arguments(**{**vars(node.args), "args": arguments}))
        returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        return f"({shown}){returned}"
    makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return _signature(makers[0]) if makers else ""


def _find(module: str, name: str) -> _Node | None:
    """Return the definition of a name, wherever it is imported from; None for what is no function or class."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return _find(node.module or "", name)
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else Path(f"{path}.py")).read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
