"""Which statements of a script are done by the fork server, which are left to the ranks, and which end the list."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.run_ahead.leading import Changes, LeadingStatements, RankError


def walk(script: str, path: str = "/src/train.py") -> tuple[list[str], int, Changes]:
    """Return what is imported, the line of the end, and what is changed, with imports that really happen."""
    done: list[str] = []
    changes = Changes()

    def on_import(text: str, _line: int, act: Callable[[], object]) -> None:
        act()
        done.append(text)

    leading = LeadingStatements(ast.parse(script), path, None, changes, on_import)
    return done, leading.run(), changes


@pytest.mark.parametrize(
    "statement",
    [
        *("x = 1", "a, b = 1, 2", "x: int = len('a')", "x: int", "f'{1}'", "pass", "assert True", "del x"),
        *("def f():\n    open('x', 'w')", "class A:\n    y = f()", "async def f(): pass", "x = os.environ.get('A')"),
        *("t = time.perf_counter()", "logger = logging.getLogger(__name__)", "from __future__ import annotations"),
        *("HERE = os.path.dirname(os.path.abspath(__file__))", "ROOT = Path(__file__).resolve().parents[1]"),
        *("if TYPE_CHECKING:\n    import nowhere", "if x:\n    import nowhere\nelse:\n    raise ImportError"),
        *("warnings.warn('x')", "x = time.time() if y else int(os.environ['RANK'])", "osp.join('a')"),
        "@functools.lru_cache(maxsize=1)\ndef f(): pass",
    ],
)
def test_statement_that_only_reads_is_skipped(statement: str) -> None:
    head = "import functools, logging, os, time, warnings\nfrom pathlib import Path\nimport os.path as osp\n"
    done, line, _ = walk(f"{head}{statement}\nimport json\n")
    assert done[-1] == "import json"
    assert line == len(f"{head}{statement}\n".splitlines()) + 1


@pytest.mark.parametrize(
    "statement",
    [
        *("print('x')", "main()", "time.sleep(1)", "x = open('y')", "Path('x').mkdir()", "Path('x').write_text('')"),
        *(
            "torch.manual_seed(1)",
            "json.x = 1",
            "x[0] = 1",
            "for i in x: pass",
            "with f(): pass",
            "x = random.random()",
        ),
        *(
            "if x:\n    main()",
            "logging.basicConfig()",
            "logging.getLogger('a').setLevel(1)",
            "raises(",
            "import nowhere",
        ),
        *("if __name__ == '__main__':\n    main()", "@torch.jit.script\ndef f(): pass", "os.makedirs('x')"),
        *("sys.path.insert(0, find())", "os.environ['A'] = str(nobody_knows)", "p = Path('x')\np.mkdir()"),
        *("log = logging.getLogger()\nlog.setLevel(1)", "try:\n    main()\nexcept ValueError: pass"),
    ],
)
def test_any_other_statement_ends_the_list(statement: str) -> None:
    head = "import logging, os, sys, time, json\nfrom pathlib import Path\n"
    try:
        done, line, _ = walk(f"{head}{statement}\nimport queue\n")
    except SyntaxError:
        return
    assert "import queue" not in done
    assert line in (3, 4)


def test_changes_of_path_environment_and_filters_are_applied_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "leading_a.py").write_text(
        "import os, sys, warnings\nSEEN = os.environ['LEADING_A'], os.environ['LEADING_B']\n"
        "sys.path.append('by the module')\nFIRST = warnings.filters[0][0]\nos.environ['LEADING_M'] = '3'\n"
    )
    monkeypatch.setenv("LEADING_B", "before")
    monkeypatch.setenv("LEADING_GONE", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "filters", [*warnings.filters])
    script = """
import os, sys, warnings
from os.path import dirname, abspath as full
if sys.version_info >= (3,):
    os.environ.setdefault("LEADING_A", "1")
else:
    os.environ["LEADING_A"] = "2"
os.environ["LEADING_B"] = f"{1 + 1}"
os.environ.pop("LEADING_GONE", None)
ROOT = dirname(dirname(full(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, os.path.join(ROOT, "lib"))
warnings.filterwarnings("ignore", message="leading")
import leading_a
"""
    path, filters = [*sys.path], [*warnings.filters]
    done, _, changes = walk(script, str(tmp_path / "src" / "train.py"))
    module = sys.modules.pop("leading_a")
    assert done[-1] == "import leading_a"
    assert (module.SEEN, module.FIRST) == (("1", "2"), "ignore")  # type: ignore[attr-defined]
    changes.undo()
    assert ("LEADING_A" in os.environ, os.environ["LEADING_B"], os.environ["LEADING_GONE"]) == (False, "before", "1")
    assert sys.path == [*path, "by the module"]
    assert warnings.filters == filters
    assert os.environ.pop("LEADING_M") == "3"  # the module's own, as in a fresh interpreter


def test_entries_of_the_path_that_a_script_removes_or_replaces_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["a", "b", "c", *sys.path])
    path = [*sys.path]
    script = "import sys\ndel sys.path[0:2]\nsys.path = ['x'] + sys.path[1:]\nsys.path.append('y')\n"
    _, line, changes = walk(script)
    assert (line, sys.path) == (4, ["x", *path[3:], "y"])
    changes.undo()
    assert sys.path == path


def test_fallback_of_an_import_is_done_as_the_script_will() -> None:
    script = "try:\n    import nowhere\nexcept ImportError:\n    import queue\nelse:\n    import nowhere\n"
    assert walk(script)[0] == ["import queue"]


def test_condition_or_value_that_differs_between_ranks_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch raises where a statement reads a variable of the rank."""

    encode = os.environ.encodekey  # type: ignore[attr-defined]

    def encodekey(name: str) -> bytes:
        if name == "RANK":
            raise RankError
        return bytes(encode(name))

    monkeypatch.setattr(os.environ, "encodekey", encodekey)
    assert walk("import os\nos.environ['RANK'] = '0'\nimport json\n")[:2] == (["import os", "import json"], 3)
    condition = "import os, sys\nif os.environ['RANK'] == '0':\n    sys.path.append('x')\nimport json\n"
    assert walk(condition)[:2] == (["import os", "import sys"], 2)


def test_fork_point_vouches_for_all_imports_above_it() -> None:
    script = """
import os
print = len
print("x")
def other():
    import nowhere
other.x = 1
import json
import megatron_ft
megatron_ft.fork_point()
import queue
"""
    done, line, _ = walk(script)
    assert done == ["import os", "import json", "import megatron_ft"]
    assert line == 10
