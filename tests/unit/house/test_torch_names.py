"""What torch keeps to itself the launcher touches in torch_compat only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megatron_ft
from megatron_ft.launcher.torch_compat.torch_agent import TorchAgent

LAUNCHER = Path(megatron_ft.__file__).parent / "launcher"
PRIVATE = re.compile(r"_(?!_)\w+")
_TORCHS = [each for each in TorchAgent.__mro__ if each.__module__.startswith("torch.")]
_INITS = [vars(each)["__init__"].__code__.co_names for each in _TORCHS if "__init__" in vars(each)]
OF_AN_AGENT = {name for names in (*map(vars, _TORCHS), *_INITS) for name in names if PRIVATE.fullmatch(name)}


def touches(text: str) -> list[str]:
    """Private names of torch in a module: imported, used of what was imported, or named in a class of an agent."""
    tree, found, torchs = ast.parse(text), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{getattr(node, 'module', None) or ''}."
            names = {f"{home}{alias.name}".strip("."): alias for alias in node.names}
            for name, alias in names.items():
                if name.split(".")[0] == "torch":
                    torchs.add(alias.asname or alias.name.split(".")[0])
                    found += [part for part in name.split(".") if PRIVATE.fullmatch(part)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            found += [node.attr] if re.split(r"[.(]", ast.unparse(node))[0] in torchs else []
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Agent") for base in node.bases):
            inside = [(getattr(each, "attr", None), getattr(each, "name", None), each) for each in ast.walk(node)]
            named = [name or attr or getattr(each, "value", None) for attr, name, each in inside]
            found += [name for name in named if isinstance(name, str) and name in OF_AN_AGENT]
    return found


def test_private_names_of_torch_are_used_in_torch_compat_only() -> None:
    paths = [path for path in sorted(LAUNCHER.rglob("*.py")) if path.parent.name != "torch_compat"]
    found = {str(path): touches(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
