"""The file that every Python of a rank's programs loads."""

from __future__ import annotations

import ast
from pathlib import Path

from megatron_ft.run_ahead.startup import STARTUP


def test_startup_file_has_no_syntax_that_python_2_lacks() -> None:
    tree = ast.parse((Path(STARTUP) / "sitecustomize.py").read_text())
    nodes = list(ast.walk(tree))
    newer = (ast.AnnAssign, ast.JoinedStr, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Match, ast.YieldFrom)
    assert not [ast.dump(node) for node in nodes if isinstance(node, newer)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        assert function.returns is None
        assert not function.args.kwonlyargs
        assert not any(argument.annotation for argument in function.args.args)
