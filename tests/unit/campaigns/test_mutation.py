"""Planted bugs of the mutation campaign: each changes one place, and which tests find them is counted."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

import pytest

from tests.mutation.mutants import code_of, mutants_of
from tests.mutation.run import needless

CODE = """class Some:
    def judge(self, late_s, bound_s, seen):
        if not seen and late_s < bound_s:
            return 1 + late_s
        seen.append(True)
        return late_s
"""
FOUND = {
    "compare:0": (5, 4, []),
    "and-or:0": (1, 4, [1]),
    "not:0": (1, 4, []),
    "arithmetic:0": (1, 4, []),
    "constant:0": (1, 4, []),
    "condition:0": (1, 4, []),
    "return:0": (1, 4, []),
    "return:1": (5, 4, []),
    "bool:0": (5, 4, []),
    "drop:0": (5, 4, []),
}


def outcome(function: FunctionType, late_s: int, bound_s: int, seen: list[int]) -> tuple[object, list[int]]:
    return function(None, late_s, bound_s, seen), seen


def test_mutant_of_each_kind_changes_what_the_function_does(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(CODE)
    namespace: dict[str, type] = {}
    exec(compile(CODE, str(path), "exec"), namespace)
    judge = namespace["Some"].__dict__["judge"]
    mutants = {mutant.name.removeprefix("some:Some.judge:"): mutant for mutant in mutants_of(path)}
    assert mutants.keys() == FOUND.keys()
    for name, (late_s, bound_s, seen) in FOUND.items():
        code = code_of(mutants[name])
        assert code is not None
        late_s = bound_s if name == "compare:0" else late_s
        assert outcome(FunctionType(code, {}), late_s, bound_s, [*seen]) != outcome(judge, late_s, bound_s, [*seen])


@pytest.mark.parametrize(
    ("finders", "left_out"),
    [
        ({"m": ["a"], "n": ["a", "b"]}, ["b", "c"]),
        ({"m": ["a[1]", "a[2]"], "n": ["b"]}, ["c"]),
        ({"m": ["a", "b"], "n": ["a", "c"], "o": []}, ["b", "c"]),
    ],
)
def test_tests_that_find_no_mutant_alone_are_named(finders: dict[str, list[str]], left_out: list[str]) -> None:
    assert sorted(needless(finders, ["a", "b", "c"])) == left_out
