"""Small planted bugs: each is one place in a function, changed."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Continue)


@dataclass(frozen=True)
class Mutant:
    """A place in the syntax tree of a file, and what is done there."""

    path: Path
    function: str  # the outermost one, with its class
    line: int
    kind: str
    place: int  # number of the node, as `ast.walk` counts
    number: int  # among those of this kind in the function

    @property
    def name(self) -> str:
        """Identify the mutant as long as the function doesn't change."""
        return f"{self.path.stem}:{self.function}:{self.kind}:{self.number}"


def mutants_of(path: Path) -> list[Mutant]:
    """Return the mutants of the bodies of all functions of a file: what runs at import stays as it is."""
    tree = ast.parse(path.read_text())
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found = []
    seen: Counter[tuple[str, str]] = Counter()
    for name, function in _outermost(tree, ""):
        for statement in function.body:
            for node in ast.walk(statement):
                for kind in _kinds(node):
                    found.append(Mutant(path, name, node.lineno, kind, numbers[id(node)], seen[name, kind]))  # type: ignore[attr-defined]
                    seen[name, kind] += 1
    return found


def code_of(mutant: Mutant) -> CodeType | None:
    """Compile the file with the mutant, and return the code of its function."""
    tree = ast.parse(mutant.path.read_text())
    target = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.place)
    _Change(target, mutant.kind).visit(tree)
    code = compile(ast.fix_missing_locations(tree), str(mutant.path), "exec")
    for part in mutant.function.split("."):
        codes = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part]
        if len(codes) != 1:
            return None  # overloaded, or a property with a setter
        code = codes[0]
    return code


def _outermost(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            yield prefix + node.name, node  # type: ignore[misc]
        elif isinstance(node, ast.ClassDef):
            yield from _outermost(node, f"{prefix}{node.name}.")


def _kinds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPS:
        return ["compare"]
    if isinstance(node, ast.BoolOp):
        return ["and-or"]
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        return ["arithmetic"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not"]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ["constant"]
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ["bool"]
    if isinstance(node, ast.Return) and node.value is not None:
        return [] if isinstance(node.value, ast.Constant) and node.value.value is None else ["return"]
    if isinstance(node, (ast.If, ast.IfExp)):
        return ["condition"]
    if isinstance(node, _DROPPED) and not _is_docstring(node):
        return ["drop"]
    return []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Change(ast.NodeTransformer):
    def __init__(self, target: ast.AST, kind: str) -> None:
        self._target, self._kind = target, kind

    def visit(self, node: ast.AST) -> ast.AST:
        return self._changed(node) if node is self._target else self.generic_visit(node)

    def _changed(self, node: ast.AST) -> ast.AST:
        new = copy.copy(node)
        if isinstance(new, ast.Compare):
            new.ops = [_FLIPS[type(new.ops[0])](), *new.ops[1:]]
        elif isinstance(new, ast.BoolOp):
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        elif isinstance(new, ast.BinOp):
            new.op = _SWAPS[type(new.op)]()
        elif isinstance(new, ast.UnaryOp):
            return new.operand
        elif isinstance(new, ast.Constant):
            new.value = not new.value if self._kind == "bool" else new.value + 1  # type: ignore[operator]
        elif isinstance(new, ast.Return):
            new.value = ast.Constant(None)
        elif isinstance(new, (ast.If, ast.IfExp)):
            new.test = ast.UnaryOp(ast.Not(), new.test)
        else:
            return ast.copy_location(ast.Pass(), node)
        return new
