"""The leading statements of a script: which of them are imports, applied changes, skipped, or the end of the list."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

_EXPRESSIONS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Set, ast.Dict),
    *(ast.JoinedStr, ast.FormattedValue, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Starred),
    *(ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop, ast.keyword),
)
_READ_MODULES = ("time.", "datetime.", "os.path.", "platform.", "typing.", "dataclasses.", "functools.", "collections.")
"""Modules whose functions only read, but for ``time.sleep``."""
_READERS = frozenset(
    {
        *("logging.getLogger", "os.environ.get", "os.getenv", "os.getcwd", "os.cpu_count", "os.getpid", "re.compile"),
        *("pathlib.Path", "pathlib.Path.cwd", "pathlib.Path.home", "enum.Enum", "contextlib.contextmanager"),
        *("importlib.util.find_spec", "importlib.metadata.version"),
    }
)
_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "bytes", "dict", "enumerate", "float", "frozenset", "getattr", "hasattr", "int"),
        *("isinstance", "issubclass", "len", "list", "max", "min", "range", "repr", "reversed", "round", "set"),
        *("sorted", "str", "sum", "tuple", "type", "vars", "zip"),
    }
)
_METHODS = frozenset(
    {
        *("absolute", "as_posix", "endswith", "exists", "format", "get", "is_dir", "is_file", "items", "join"),
        *("joinpath", "keys", "lower", "lstrip", "partition", "replace", "resolve", "rpartition", "rsplit", "rstrip"),
        *("split", "startswith", "strip", "upper", "values", "with_name", "with_suffix"),
    }
)
"""Methods of texts, paths and dictionaries that only read."""
_CHANGERS = frozenset(
    {
        *("os.environ.setdefault", "os.environ.update", "os.environ.pop"),
        *("sys.path.append", "sys.path.insert", "sys.path.extend", "sys.path.remove", "sys.path.pop"),
        *("warnings.filterwarnings", "warnings.simplefilter"),
    }
)
_VOUCH = "fork_point"


class EndError(Exception):
    """Raised at the first statement that does something."""


class RankError(BaseException):
    """Raised while a leading statement is evaluated that asks for what differs between ranks."""


class Changes:
    """Changes to the environment, ``sys.path`` and the warning filters that belong to the script, and their undoing."""

    def __init__(self) -> None:
        self._environment: dict[str, str | None] = {}
        self._added: list[str] = []
        self._removed: list[tuple[int, str]] = []
        self._filters: list[Any] = []

    def apply(self, act: Callable[[], object]) -> None:
        """Call ``act`` and note what it changes."""
        environment, path, filters = dict(os.environ._data), list(sys.path), list(warnings.filters)  # type: ignore[attr-defined]
        try:
            act()
        finally:
            after = os.environ._data  # type: ignore[attr-defined]
            for name in environment.keys() | after.keys():
                if environment.get(name) != after.get(name):
                    before = environment.get(name)
                    self._environment.setdefault(os.fsdecode(name), None if before is None else os.fsdecode(before))
            self._added += [entry for entry in sys.path if entry not in path]
            self._removed += [(index, entry) for index, entry in enumerate(path) if entry not in sys.path]
            self._filters += [each for each in warnings.filters if each not in filters]

    def undo(self) -> None:
        """Undo the changes; those that imported modules have made stay."""
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for entry in self._added:
            if entry in sys.path:
                sys.path.remove(entry)
        for index, entry in self._removed:
            sys.path.insert(index, entry)
        left = [each for each in warnings.filters if each not in self._filters]
        warnings.filters[:] = left  # type: ignore[index]


class LeadingStatements:
    """Walks a script's statements, imports what they import, and stops at the first one that does more than read."""

    def __init__(
        self,
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
        self._vouched = 0
        """Line of ``fork_point()``: all imports above it are shared, whatever lies between."""

    def find_vouched(self, tree: ast.Module) -> bool:
        """Return True if the user vouches for all imports above a line, with ``fork_point()`` there."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._vouched = max((call.lineno for call in calls if _last_name(call.func) == _VOUCH), default=0)
        return self._vouched > 0

    def run(self, tree: ast.Module) -> int:
        """Walk the statements. Return the line at which the list ends, or the last one."""
        last = 0
        for node in tree.body:
            if self._vouched and node.lineno >= self._vouched:
                return node.lineno
            try:
                self._take(node)
            except (EndError, ImportError):
                return node.lineno
            last = node.end_lineno or node.lineno
        return last

    def _take(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Try():
                self._try(node)
            case ast.If() if not self._is_skipped(node):
                self._if(node)
            case ast.With() if self._vouched:
                self._take_all(node.body)
            case ast.FunctionDef() if node.lineno < self._vouched <= (node.end_lineno or 0):
                for each in node.body:
                    if each.lineno < self._vouched:
                        self._take(each)
            case _ if self._changes_something(node):
                self._change(node)
            case _ if self._is_skipped(node):
                self._note_values(node)
            case _ if not self._vouched:
                raise EndError

    def _take_all(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            self._take(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            bound = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0])
            self._full_names[bound] = full if alias.asname or isinstance(node, ast.ImportFrom) else bound
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return
        try:
            self._on_import(ast.unparse(node), node.lineno, lambda: self._execute(node))
        except ImportError:
            raise
        except BaseException as error:  # a module may raise anything, SystemExit included
            raise EndError from error  # its rank meets it itself

    def _try(self, node: ast.Try) -> None:
        """Follow ``try: import`` with its fallback, as the script will."""
        try:
            self._take_all(node.body)
        except ImportError:
            self._take_all([each for handler in node.handlers for each in handler.body])
        else:
            self._take_all(node.orelse)
        self._take_all(node.finalbody)

    def _if(self, node: ast.If) -> None:
        """Follow the branch that the script will take, if that is the same in all ranks."""
        if not self._reads(node.test):
            raise EndError
        try:
            is_true = self._evaluate(node.test)
        except RankError:
            raise EndError from None
        self._take_all(node.body if is_true else node.orelse)

    def _change(self, node: ast.stmt) -> None:
        try:
            self._changes.apply(lambda: self._evaluate(node))
        except RankError:
            return  # a variable of the rank: the script sets it there

    def _evaluate(self, node: ast.expr | ast.stmt) -> Any:
        """Evaluate or execute a node with what the script knows by then."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        try:
            for name in (names - self._namespace.keys()) & self._unread.keys():
                value = self._unread.pop(name)
                self._namespace[name] = self._evaluate(value)
            return self._execute(node)
        except (EndError, RankError):
            raise
        except Exception:  # noqa: BLE001 - whatever the statement raises, it raises in the script, too
            raise EndError from None

    def _execute(self, node: ast.expr | ast.stmt) -> Any:
        name = str(self._namespace["__file__"])
        if isinstance(node, ast.expr):
            return eval(compile(ast.Expression(node), name, "eval", dont_inherit=True), self._namespace)
        return exec(compile(ast.Module([node], []), name, "exec", dont_inherit=True), self._namespace)

    # -- what a statement does ----------------------------------------------------------------------------

    def _is_skipped(self, node: ast.stmt) -> bool:
        """Return True if a statement only reads, so that ranks do it themselves."""
        match node:
            case ast.Pass() | ast.Global() | ast.Raise() | ast.Import() | ast.ImportFrom():
                return True  # the last three: within an ``if``
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return all(map(self._only_reads, map(_called, node.decorator_list)))
            case ast.Assign(targets=targets, value=value):
                return all(map(_is_name, targets)) and self._reads(value)
            case ast.AnnAssign(target=ast.Name(), value=value):
                return value is None or self._reads(value)
            case ast.AugAssign(target=ast.Name(), value=value):
                return self._reads(value)
            case ast.Delete(targets=targets):
                return all(map(_is_name, targets))
            case ast.Assert(test=test):
                return self._reads(test)
            case ast.Expr(value=value):
                return (
                    self._reads(value)
                    or self._is_about_warnings(_called(value))
                    or _last_name(_called(value)) == _VOUCH
                )
            case ast.If(test=test):
                return self._reads(test) and all(self._is_conditional(each) for each in [*node.body, *node.orelse])
        return False

    def _is_conditional(self, node: ast.stmt) -> bool:
        """Return True for what may stand under an ``if`` that is skipped."""
        is_hook = isinstance(node, ast.Assign) and all(map(self._is_about_warnings, node.targets))
        return is_hook or self._is_skipped(node)

    def _is_about_warnings(self, node: ast.expr) -> bool:
        return self._full_name(node).startswith("warnings.")

    def _note_values(self, node: ast.stmt) -> None:
        """Note what names stand for, in case a change of ``sys.path`` needs it."""
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

    def _changes_something(self, node: ast.stmt) -> bool:
        """Return True if a statement changes the environment, ``sys.path`` or warning filters, in a way known here."""
        match node:
            case ast.Expr(value=ast.Call(func=function, args=args, keywords=keywords)):
                values = [*args, *(each.value for each in keywords)]
                return self._full_name(function) in _CHANGERS and all(map(self._reads, values))
            case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
                return self._is_changed(target) and self._reads(value)
            case ast.Delete(targets=targets):
                return all(map(self._is_changed, targets))
        return False

    def _is_changed(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            return self._full_name(target.value) in ("os.environ", "sys.path")
        return self._full_name(target) == "sys.path"

    def _reads(self, node: ast.AST) -> bool:
        """Return True if an expression only reads."""
        if isinstance(node, ast.Call) and not self._only_reads(node.func):
            return False
        if not isinstance(node, (ast.Call, *_EXPRESSIONS)):
            return False
        return all(map(self._reads, ast.iter_child_nodes(node)))

    def _only_reads(self, function: ast.expr) -> bool:
        name = self._full_name(function)
        if name in _BUILTINS or name in _READERS or (name.startswith(_READ_MODULES) and name != "time.sleep"):
            return True
        return isinstance(function, ast.Attribute) and function.attr in _METHODS and not name.startswith("os.environ.")

    def _full_name(self, node: ast.expr) -> str:
        """Return "os.path.join" for what the script calls osp.join; empty for other expressions."""
        if isinstance(node, ast.Name):
            return self._full_names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self._full_name(node.value)) and owner != "?":
            return f"{owner}.{node.attr}"
        return ""


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Tuple) and all(map(_is_name, node.elts)))


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
