"""Who may import whom: the floors only look down.

Every import statement counts, those inside functions and under TYPE_CHECKING too. The table below is the
rule; the second half plants violations in a copy of the package, to prove that a violation is found.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import megatron_ft
from tests.unit.house.fresh_interpreter import output_of

PACKAGE = Path(megatron_ft.__file__).parent


@dataclass(frozen=True)
class Floor:
    """What one folder (or module) may import, beside the standard library and itself."""

    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    outside_in_functions: tuple[str, ...] = ()  # only inside functions, or under TYPE_CHECKING
    pure: bool = False  # no I/O and no clock


_VALUES = ("errors", "exit_codes", "link/base", "link/facts", "link/messages")
FLOORS = {
    "errors": Floor(inside=("link/base",), pure=True),
    "exit_codes": Floor(pure=True),
    # the bottom: values and names, facts of the event log, messages (which carry what diagnosis and learning know of a
    # rank); then files, sockets, /proc and the event loop
    "link/base": Floor(inside=("errors", "exit_codes"), pure=True),
    "link/facts": Floor(inside=("errors", "link/base", "memory/rules"), pure=True),
    "link/messages": Floor(inside=(*_VALUES, "diagnosis", "learning"), pure=True),
    "link": Floor(inside=(*_VALUES, "diagnosis"), outside_in_functions=("pynvml",)),
    "config": Floor(inside=("errors", "link/base", "link/facts"), pure=True),
    "config/files": Floor(inside=("config", "errors", "link", "link/base", "link/facts")),
    # what is told of a job: accounting, metrics, spans, notifications; the event log; the launcher's outputs
    "records/rules": Floor(inside=("link/base", "link/facts", "diagnosis", "job/rules"), pure=True),
    "records": Floor(
        inside=("errors", "config", "link", "link/base", "link/facts", "records/rules"),
        outside_in_functions=("prometheus_client",),
    ),
    "records/launcher": Floor(
        inside=(
            "errors",
            "config",
            "link",
            *_VALUES,
            "job/rules",
            "records",
            "records/rules",
            "launcher/base",
            "launcher/processes",
        ),
    ),
    # pure; their parts at the leader know its rules, those on a launcher its machine
    "diagnosis": Floor(inside=(*_VALUES, "job/rules"), pure=True),
    "diagnosis/launcher": Floor(
        inside=(*_VALUES, "config", "diagnosis", "learning", "launcher/rules", "job/rules"), pure=True
    ),
    "learning": Floor(inside=(*_VALUES, "config", "job/rules", "launcher/rules", "monitor/rules"), pure=True),
    "learning/state_file": Floor(inside=("errors", "link", "link/base", "learning")),
    "rank": Floor(
        inside=(
            *_VALUES,
            "config",
            "config/files",
            "diagnosis",
            "learning",
            "link",
            "monitor/process",
            "records/event_log",
        ),
        outside_in_functions=("torch",),
    ),
    "monitor/rules": Floor(inside=("link/base", "link/facts"), pure=True),
    "monitor/process": Floor(inside=(*_VALUES, "config", "link")),
    "monitor": Floor(
        inside=(
            *_VALUES,
            "config",
            "diagnosis",
            "learning",
            "link",
            "monitor/rules",
            "monitor/process",
            "records/event_log",
        )
    ),
    # memory checkpoints in one room: rules, the leader's part, files and messages, and the part of each process
    "memory/rules": Floor(inside=("errors", "link/base"), pure=True),
    "memory/leader": Floor(inside=(*_VALUES, "job/rules", "memory/rules"), pure=True),
    "memory/base": Floor(inside=(*_VALUES, "link", "memory/rules")),
    "memory/keeper": Floor(inside=(*_VALUES, "link", "memory/rules", "memory/base")),
    "memory/rank": Floor(
        inside=(*_VALUES, "link", "rank/base", "memory/rules", "memory/base"), outside_in_functions=("torch",)
    ),
    "memory/launcher": Floor(
        inside=(*_VALUES, "link", "job/rules", "launcher/rules", "launcher/base", "memory/rules", "memory/base")
    ),
    "memory": Floor(),
    "run_ahead": Floor(inside=(*_VALUES, "link", "rank", "records/event_log")),
    "job/rules": Floor(inside=(*_VALUES, "config", "memory/rules"), pure=True),
    # with the list of a leader's parts
    "job": Floor(inside=(*_VALUES, "link", "diagnosis", "learning", "memory/leader", "job/rules", "launcher/rules")),
    "launcher/rules": Floor(
        inside=(*_VALUES, "config", "diagnosis", "learning", "job/rules", "records/rules"), pure=True
    ),
    "launcher": Floor(
        inside=(
            *(*_VALUES, "config", "config/files", "diagnosis", "diagnosis/launcher", "job", "job/rules"),
            *("launcher/rules", "learning", "learning/state_file", "link", "memory/base", "memory/launcher"),
            *("memory/rules", "monitor/process", "records", "records/launcher", "records/rules", "run_ahead"),
        ),
        outside=("torch",),
    ),
    "cli": Floor(
        inside=(*(*_VALUES, "config", "config/files", "link", "job/rules", "records/rules"),),
        outside=("rich", "numpy"),
        outside_in_functions=("jinja2",),
    ),
    "fault_tolerance": Floor(
        inside=("errors", "learning", "link", "link/base", "rank"), outside_in_functions=("torch",)
    ),
    "memory_checkpoint": Floor(inside=("errors", "link/base", "rank", "memory/rank", "memory/rules")),
    "integrations": Floor(
        inside=(
            *(*_VALUES, "link", "learning", "learning/state_file", "rank", "cli", "fault_tolerance"),
            *("memory/rank", "memory/rules"),
        ),
        outside=("torch", "lightning", "pytorch_lightning", "megatron"),
    ),
    "__main__": Floor(inside=("cli",)),
    "__init__": Floor(
        inside=("errors", "config/files", "learning", "link", "link/base", "rank", "run_ahead")
    ),  # the public names; test_public_names checks its laziness
}
# yaml is for the files that a user writes, and only their readers may know it.
YAML_READERS = ("config/files/yaml_file.py", "rank/faults/plan.py")
IMPURE_MODULES = {
    *("asyncio", "ctypes", "fcntl", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "select"),
    *("selectors", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time"),
}
IMPURE_CALLS = {"open", "print", "input", "now", "today", "utcnow"}
_SPLIT = {name.partition("/")[0] for name in FLOORS if "/" in name}


@dataclass(frozen=True)
class Import:
    target: str  # "torch.distributed", "megatron_ft.link.board"
    line: int
    lazy: bool
    names: tuple[str, ...] = ()  # "from target import names"


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import in a module of `package` ("megatron_ft.link"); calls of import_module with a constant count
    too."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            if start.count(".") == 0 and start == PACKAGE.name:
                yield from (Import(_home_of(alias.name), node.lineno, lazy) for alias in node.names)
            else:
                yield Import(start, node.lineno, lazy, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, lazy)
        deeper = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deeper = deeper or (isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deeper)

    return visit(tree, False)


def _home_of(public_name: str) -> str:
    """`from megatron_ft import X` is an import of the module that X lives in."""
    return megatron_ft._HOME.get(public_name, f"{PACKAGE.name}.{public_name}")


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.cache
def facts_of(text: str, package: str) -> tuple[list[Import], list[tuple[int, str]]]:
    """The imports of a module, and the line and name of each call that a pure one may not make."""
    tree = ast.parse(text)
    calls = [(node.lineno, _name(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return list(imports_of(tree, package)), [call for call in calls if call[1] in IMPURE_CALLS]


def violations_in(relative: Path, text: str) -> list[str]:
    """Return what the table forbids in a module of the package, one line for each import and call."""
    floor_name = _floor_of(relative.with_suffix("").as_posix())
    if not floor_name:
        return [f"{relative}: on no floor of the table"]
    floor = FLOORS[floor_name]
    imports, impure = facts_of(text, ".".join((PACKAGE.name, *relative.parts[:-1])))
    found = [each for each in imports if not _allowed(each, floor_name, floor, relative)]
    lines = [f"{relative}:{each.line}: may not import {each.target}" for each in found]
    return lines + [f"{relative}:{line}: may not call {name}()" for line, name in impure if floor.pure]


def _floor_of(place: str) -> str:
    """Return the name of the floor of a module: a row of the table may be about a part of a folder."""
    return max((name for name in FLOORS if f"{place}/".startswith(f"{name}/")), key=len, default="")


def _allowed(each: Import, floor_name: str, floor: Floor, relative: Path) -> bool:
    top, *rest = each.target.split(".")
    if top == PACKAGE.name:
        is_split = len(rest) == 1 and rest[0] in _SPLIT  # then the parts that are imported from there count
        places = [f"{rest[0]}/{name}" for name in each.names] if is_split else ["/".join(rest)]
        allowed = (floor_name, *floor.inside, "__version__")
        return not rest or all(any(f"{place}/".startswith(f"{name}/") for name in allowed) for place in places)
    if top in sys.stdlib_module_names:
        return not (floor.pure and top in IMPURE_MODULES)
    if top == "msgspec":  # messages and records on every floor: it does no I/O and reads no clock
        return True
    if top == "yaml":
        return relative.as_posix() in YAML_READERS
    return top in floor.outside or (each.lazy and top in floor.outside_in_functions)


def circles(texts: Mapping[Path, str]) -> list[str]:
    """Return the folders that can be reached from themselves by the imports of these modules."""
    looks_into: dict[str, set[str]] = {}
    for relative, text in texts.items():
        room = relative.parent
        if room.parts:
            imports, _ = facts_of(text, ".".join((PACKAGE.name, *room.parts)))
            ours = [each for each in imports if each.target.startswith(f"{PACKAGE.name}.")]
            homes = (_room_of(f"{each.target}.{name}") for each in ours for name in each.names or ("",))
            looks_into.setdefault(str(room), set()).update(home for home in homes if home not in (".", str(room)))
    return [room for room in looks_into if room in _reached(looks_into, room)]


def _room_of(target: str) -> str:
    place = PACKAGE.joinpath(*target.split(".")[1:])
    while not place.is_dir():
        place = place.parent
    return str(place.relative_to(PACKAGE))


def _reached(looks_into: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        new = looks_into.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def package() -> dict[Path, str]:
    return {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_the_floors_only_look_down() -> None:
    assert [line for relative, text in package().items() for line in violations_in(relative, text)] == []


def test_rooms_do_not_import_each_other() -> None:
    assert circles(package()) == []


def loaded_by(*folders: str) -> set[str]:
    """The top-level modules that a fresh process has loaded after importing everything in these folders."""
    paths = [path for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    modules = [name for name in names if not name.endswith("__main__")]
    script = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    return {name.split(".")[0] for name in output_of(script).split()}


@pytest.mark.parametrize(
    ("folders", "heavy"),
    [
        (
            ["link", "monitor", "job", "memory/rules", "memory/leader", "memory/keeper"],
            {"torch", "numpy"},
        ),
        (["cli"], {"torch", "matplotlib", "rich"}),  # before it draws
        # it is started when the one before it has died: each tenth of a second is one of the job's
        (["job"], {"torch", "numpy", "yaml", "logging", "asyncio", "rich"}),
        # every rank has one: what it loads is paid for on every node as often as there are ranks
        (["monitor"], {"torch", "numpy", "yaml", "logging", "argparse", "asyncio", "rich"}),
    ],
)
def test_folders_load_nothing_heavy(folders: list[str], heavy: set[str]) -> None:
    assert not heavy & loaded_by(*folders)


def test_process_that_prints_nothing_does_not_import_logging() -> None:
    script = "import sys; from megatron_ft.link import log; log.MONITOR.set_level(20); log.MONITOR.debug('x')"
    assert output_of(f"{script}; print('logging' in sys.modules)").strip() == "False"


def test_a_monitor_loads_all_of_its_code_when_it_starts() -> None:
    """Later the file system that it is installed on may not answer any more: a hung rank would live on."""
    needed = {f"{PACKAGE.name}.monitor.{path.stem}" for path in (PACKAGE / "monitor").glob("*.py")}
    needed = {name.removesuffix(".__init__") for name in needed} | {f"{PACKAGE.name}.link.files.evidence_files"}
    script = f"import sys, {PACKAGE.name}.monitor.__main__\nprint(*sys.modules)"
    assert needed - set(output_of(script).split()) == set()


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("link/base/planted.py", "import time", "may not import time"),
        ("link/base/planted.py", "from datetime import datetime\ndatetime.now()", "may not call now"),
        ("link/base/planted.py", "from ..wire import Channel", "may not import megatron_ft.link.wire"),
        ("link/base/planted.py", "from megatron_ft import FaultToleranceConfig", "may not import megatron_ft.config"),
        ("link/planted.py", "import psutil", "may not import psutil"),
        ("link/planted.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", "import torch"),
        ("monitor/planted.py", "import importlib\nimportlib.import_module('torch.cuda')", "import torch.cuda"),
        ("fault_tolerance.py", "import torch", "may not import torch"),
        ("planted.py", "import os", "on no floor"),
    ],
)
def test_a_planted_violation_is_found(file: str, code: str, words: str) -> None:
    (planted,) = violations_in(Path(file), code)
    assert words in planted
