"""The leading statements of a script: which of them are imports, applied changes, skipped, or the end of the list."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_STATEMENTS = (
    *(ast.Pass, ast.Global, ast.Raise, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign),
    *(ast.Delete, ast.Assert, ast.Expr, ast.If),
)
"""Statements that do nothing but what their expressions do."""
_READ_MODULES = ("time.", "datetime.", "os.path.", "platform.", "typing.", "dataclasses.", "functools.", "collections.")
"""Modules whose functions only read, but for ``time.sleep``."""
_READERS = {
    *("abs", "all", "any", "bool", "bytes", "dict", "enumerate", "float", "frozenset", "getattr", "hasattr", "int"),
    *("isinstance", "issubclass", "len", "list", "max", "min", "range", "repr", "reversed", "round", "set", "sorted"),
    *("str", "sum", "tuple", "type", "vars", "zip"),
    *("logging.getLogger", "os.environ.get", "os.getenv", "os.getcwd", "os.cpu_count", "os.getpid", "re.compile"),
    *("pathlib.Path", "pathlib.Path.cwd", "pathlib.Path.home", "contextlib.contextmanager"),
    *("importlib.util.find_spec", "importlib.metadata.version"),
}
_METHODS = {
    *("absolute", "as_posix", "endswith", "exists", "format", "get", "is_dir", "is_file", "items", "join"),
    *("joinpath", "keys", "lower", "lstrip", "partition", "replace", "resolve", "rpartition", "rsplit", "rstrip"),
    *("split", "startswith", "strip", "upper", "values", "with_name", "with_suffix"),
}
"""Methods of texts, paths and dictionaries that only read."""
_CHANGERS = {
    *("os.environ.setdefault", "os.environ.update", "os.environ.pop"),
    *("sys.path.append", "sys.path.insert", "sys.path.extend", "sys.path.remove", "sys.path.pop"),
    *("warnings.filterwarnings", "warnings.simplefilter"),
}
_VOUCH = "fork_point"


class EndError(Exception):
    """Raised at the first statement that does something."""


class RankError(EndError):
    """Raised while a leading statement is evaluated that asks for what differs between ranks."""


class Changes:
    """Changes to the environment, ``sys.path`` and the warning filters that belong to the script, and their undoing."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def apply(self, act: Callable[[], object]) -> None:
        """Call ``act`` and note what it changes."""
        environment = dict(os.environ._data)  # type: ignore[attr-defined]
        path, lists = sys.path, [sys.path, warnings.filters]
        before: list[list[Any]] = [[*each] for each in lists]
        try:
            act()
        finally:
            after = os.environ._data  # type: ignore[attr-defined]
            for name in environment.keys() | after.keys():
                if name not in environment:
                    self._undo.append(partial(os.environb.pop, name, None))
                elif environment[name] != after.get(name):
                    self._undo.append(partial(os.environb.__setitem__, name, environment[name]))
            path[:], sys.path = sys.path, path  # one list, also where a script has set another one
            now: Any
            for now, then in zip(lists, before, strict=True):
                self._undo += [partial(now.remove, entry) for entry in now if entry not in then]
                self._undo += [
                    partial(now.insert, at, entry) for at, entry in [*enumerate(then)][::-1] if entry not in now
                ]

    def undo(self) -> None:
        """Undo the changes; those that imported modules have made stay."""
        for undo in reversed(self._undo):
            with contextlib.suppress(ValueError):  # a module has removed an entry itself
                undo()


class LeadingStatements:
    """Walks a script's statements, imports what they import, and stops at the first one that does more than read."""

    def __init__(
        self,
        tree: ast.Module,
        path: str,
        package: str | None,
        changes: Changes,
        on_import: Callable[[str, int, Callable[[], object]], None],
    ) -> None:
        """``on_import`` is called with the text and line of each import, and a function that does it."""
        self._namespace: dict[str, Any] = {"__name__": "__main__", "__file__": path, "__package__": package}
        self._changes = changes
        self._on_import = on_import
        self._full_names: dict[str, str] = {}
        """What the script's names of modules and their functions stand for: osp is "os.path"."""
        self._unread: dict[str, ast.expr] = {}
        """Values of names, evaluated when a change needs them."""
        self._tree = tree
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.vouched = max((call.lineno for call in calls if ast.unparse(call.func).endswith(_VOUCH)), default=0)
        """Line of ``fork_point()``, 0 without one: all imports above it are shared, whatever lies between."""

    def run(self) -> int:
        """Walk the statements. Return the line at which the list ends, or the last one."""
        for node in self._tree.body:
            try:
                if self.vouched and node.lineno >= self.vouched:
                    raise EndError
                self._take(node)
            except (EndError, ImportError):
                return node.lineno
        return self._tree.body[-1].end_lineno or 0 if self._tree.body else 0

    def _take(self, node: ast.stmt) -> None:
        """Follow one statement.

        Raises:
            EndError: it does something.
            ImportError: it imports what isn't there.
        """
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Try():  # with its fallback, as the script will
                try:
                    self._take_all(node.body)
                except ImportError:
                    self._take_all([each for handler in node.handlers for each in handler.body])
                else:
                    self._take_all(node.orelse)
                self._take_all(node.finalbody)
            case ast.If() if not self._reads(node):  # the branch that the script will take, the same in all ranks
                if not self._reads(node.test):
                    raise EndError
                self._take_all(node.body if self._evaluate(node.test) else node.orelse)
            case _ if self._changes_something(node):
                with contextlib.suppress(RankError):  # otherwise a variable of the rank: the script sets it there
                    self._changes.apply(lambda: self._evaluate(node))
            case _ if self._reads(node):
                self._note_value(node)
            case _ if not self.vouched:
                raise EndError

    def _take_all(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            self._take(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self._full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            else:
                top = alias.name.partition(".")[0]
                self._full_names[alias.asname or top] = alias.name if alias.asname else top
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return
        parts = [ast.Import([alias]) for alias in node.names] if isinstance(node, ast.Import) else [node]
        for part in parts:
            ast.copy_location(part, node)
            self._on_import(ast.unparse(part), node.lineno, partial(self._execute, part))

    def _evaluate(self, node: ast.expr | ast.stmt) -> Any:
        """Evaluate or execute a node with what the script knows by then."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        try:
            for name in (names - self._namespace.keys()) & self._unread.keys():
                self._namespace[name] = self._evaluate(self._unread.pop(name))
            return self._execute(node)
        except RankError:
            raise
        except Exception:  # noqa: BLE001 - whatever the statement raises, it raises in the script, too
            raise EndError from None

    def _execute(self, node: ast.expr | ast.stmt) -> Any:
        name = str(self._namespace["__file__"])
        if isinstance(node, ast.expr):
            return eval(compile(ast.Expression(node), name, "eval", dont_inherit=True), self._namespace)
        return exec(compile(ast.Module([node], []), name, "exec", dont_inherit=True), self._namespace)

    def _note_value(self, node: ast.stmt) -> None:
        """Note what a name stands for, in case a change of ``sys.path`` needs it."""
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._namespace.pop(name, None)
                self._unread[name] = value
                self._full_names[name] = self._full_name(value) or "?"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AugAssign(target=ast.Name(id=name)):
                self._full_names[name] = "?"

    # -- what a statement does ----------------------------------------------------------------------------

    def _reads(self, node: ast.AST) -> bool:
        """Return True if a statement or an expression only reads, so that ranks do it themselves."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                decorators = getattr(node, "decorator_list", [])
                return all(self._only_reads(each.func if isinstance(each, ast.Call) else each) for each in decorators)
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                return self._full_name(node).startswith("warnings.")
            case ast.Call(func=function) if not self._only_reads(function):
                return False
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return False
        return all(map(self._reads, ast.iter_child_nodes(node)))

    def _only_reads(self, function: ast.expr) -> bool:
        """Return True for a function, or a decorator, that only reads."""
        name = self._full_name(function)
        if name in _READERS or name.startswith("warnings.") or name.rpartition(".")[2] == _VOUCH:
            return True
        if name.startswith(_READ_MODULES):
            return name != "time.sleep"
        return isinstance(function, ast.Attribute) and function.attr in _METHODS and not name.startswith("os.environ.")

    def _changes_something(self, node: ast.stmt) -> bool:
        """Return True if a statement changes the environment, ``sys.path`` or warning filters, in a way known here."""
        match node:
            case ast.Expr(value=ast.Call(func=function, args=args, keywords=keywords)):
                return self._full_name(function) in _CHANGERS and all(map(self._reads, [*args, *keywords]))
            case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
                return self._is_changed(target) and self._reads(value)
            case ast.Delete(targets=targets):
                return all(map(self._is_changed, targets))
        return False

    def _is_changed(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            return self._full_name(target.value) in ("os.environ", "sys.path")
        return self._full_name(target) == "sys.path"

    def _full_name(self, node: ast.expr) -> str:
        """Return "os.path.join" for what the script calls osp.join; empty for other expressions."""
        if isinstance(node, ast.Name):
            return self._full_names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self._full_name(node.value)) and owner != "?":
            return f"{owner}.{node.attr}"
        return ""
