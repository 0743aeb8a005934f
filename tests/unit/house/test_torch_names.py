"""What torch keeps to itself the launcher touches in torch_compat only; the second half plants violations."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent
LAUNCHER = PACKAGE / "launcher"
COMPAT = LAUNCHER / "torch_compat"


def touches(text: str) -> list[str]:
    """Private names of torch in a module, each with its line: imported, read, written, called or overridden."""
    tree = ast.parse(text)
    homes = _homes(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_torchs(node.module or ""):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"{node.lineno}: imports {name}" for name in names if _is_private(name)]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if _is_torchs(alias.name) for part in alias.name.split(".")]
            found += [f"{node.lineno}: imports {part}" for part in parts if _is_private(part)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and _is_torchs(homes.get(_root(node), "")):
            found.append(f"{node.lineno}: uses {node.attr}")
    inherited: dict[str, set[str]] = {}
    for made in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        names = inherited[made.name] = set()
        for base in made.bases:
            names |= inherited.get(ast.unparse(base), set()) or _names_of(base, homes)
        found += [f"{line}: {name} of a base class" for line, name in _named_in(made) if name in names]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_torchs(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _homes(tree: ast.Module) -> dict[str, str]:
    """Where the imported names are from: of a module its own name, of anything else MODULE.NAME."""
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            homes |= {alias.asname: alias.name for alias in node.names if alias.asname}
            homes |= {top: top for top in (alias.name.split(".")[0] for alias in node.names if not alias.asname)}
        elif isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return homes


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names_of(base: ast.expr, homes: dict[str, str]) -> set[str]:
    """Private names of torch that a class inherits from this one."""
    root = _root(base)
    home = homes.get(root, "")
    if home.split(".")[0] not in ("torch", PACKAGE.name):
        return set()
    module, _, name = (home + ast.unparse(base).removeprefix(root)).rpartition(".")
    found = getattr(importlib.import_module(module), name)
    torchs = [each for each in found.__mro__ if _is_torchs(each.__module__)]
    names = {name for each in torchs for name in each.__dict__}
    for each in torchs:
        names |= set(getattr(each.__dict__.get("__init__"), "__code__", _nothing.__code__).co_names)
    return {name for name in names if _is_private(name)}


def _nothing() -> None:
    pass


def _named_in(made: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for node in ast.walk(made):
        if isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # as getattr has it
            yield node.lineno, node.value


def test_private_names_of_torch_are_used_in_torch_compat_only() -> None:
    paths = [path for path in sorted(LAUNCHER.rglob("*.py")) if path.parent != COMPAT]
    found = {str(path.relative_to(PACKAGE)): touches(path.read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


AGENT = "from megatron_ft.launcher.torch_compat.torch_agent import TorchAgent\nclass Agent(TorchAgent):\n    "
TORCHS = "from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent\n"
QUALIFIED = "import torch.distributed.elastic.agent.server.api as api\nclass Agent(api.SimpleElasticAgent):\n    "


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (AGENT + "def _invoke_run(self, role): ...", "3: _invoke_run"),
        (AGENT + "def f(self): return self._worker_group", "3: _worker_group"),
        (AGENT + "def f(self): self._pcontext = None", "3: _pcontext"),
        (AGENT + "def f(self): super()._shutdown()", "3: _shutdown"),
        (AGENT + "def f(self): return getattr(self, '_uninterruptible_state_timeout', 0)", "3: _uninterruptible"),
        (AGENT + "pass\nclass B(Agent):\n    def f(self): return self._store", "5: _store"),
        (TORCHS + "class A(LocalElasticAgent):\n    def f(self): self._exit_barrier()", "3: _exit_barrier"),
        (QUALIFIED + "def f(self): self._initialize_workers()", "3: _initialize_workers"),
        ("from torch.numa.binding import _maybe_wrap", "1: imports _maybe_wrap"),
        ("import torch._C", "1: imports _C"),
        ("def f():\n    from torch._inductor import config", "2: imports _inductor"),
        ("import torch\ntorch.cuda._lazy_init()", "2: uses _lazy_init"),
        (TORCHS + "LocalElasticAgent._shutdown = None", "2: uses _shutdown"),
    ],
)
def test_a_planted_touch_is_found(code: str, words: str) -> None:
    found = touches(code)
    assert len(found) == 1, found
    assert found[0].startswith(words)
