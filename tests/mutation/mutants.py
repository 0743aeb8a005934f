"""Small planted bugs: each is one place in a function, changed."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_SWAPS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
                if (change := _changed(node)) is not None:
                    kind = change[0]
                    found.append(Mutant(path, name, node.lineno, kind, numbers[id(node)], seen[name, kind]))  # type: ignore[attr-defined]
                    seen[name, kind] += 1
    return found


def code_of(mutant: Mutant) -> CodeType | None:
    """Compile the file with the mutant, and return the code of its function."""
    tree = ast.parse(mutant.path.read_text())
    target = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.place)
    _Change(target).visit(tree)
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


def _changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the kind of bug that can be planted at a node, and what takes its place then; None where none can."""
    new: Any = copy.copy(node)
    match node:
        case ast.Compare(ops=[first, *others]) if type(first) in _FLIPS:
            new.ops = [_FLIPS[type(first)](), *others]
            return "compare", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            return "and-or", new
        case ast.BinOp(op=op) if type(op) in _SWAPS:
            new.op = _SWAPS[type(op)]()
            return "arithmetic", new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return "not", operand
        case ast.Constant(value=bool(value)):
            new.value = not value
            return "bool", new
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
            return "constant", new
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            new.value = ast.Constant(None)
            return "return", new
        case ast.If(test=test) | ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            return "condition", new
        case ast.Expr(value=ast.Constant()):
            return None
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Continue():
            return "drop", ast.copy_location(ast.Pass(), node)
    return None


class _Change(ast.NodeTransformer):
    def __init__(self, target: ast.AST) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> ast.AST:
        found = _changed(node) if node is self._target else None
        return self.generic_visit(node) if found is None else found[1]
