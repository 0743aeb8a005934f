"""Each folder of the package has a budget of lines and statements, which only goes down."""

from __future__ import annotations

from pathlib import Path

from tests.support.budget import PATH, budget, exceeded, sizes


def test_no_room_is_larger_than_its_budget() -> None:
    grown = list(exceeded(sizes(), budget()))
    assert not grown, f"{grown}: {PATH.name} only goes down, make room elsewhere in the same folder"


def test_rows_are_those_of_the_folders() -> None:
    assert budget().keys() == sizes().keys()


def test_statements_are_counted_without_docstrings(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    (tmp_path / "top.py").write_text('"""Words."""\nx = 1\n')
    (tmp_path / "room" / "inner" / "a.py").write_text('def f():\n    """Words."""\n    return 1\n')
    (tmp_path / "room" / "b.py").write_text("if x: y()\n")
    assert sizes(tmp_path) == {"(top)": (2, 1), "room": (4, 4)}


def test_growth_by_one_line_or_statement_is_told_and_a_folder_without_a_row() -> None:
    most = {"core": (10, 5), "ipc": (7, 7)}
    assert list(exceeded({"core": (10, 5), "ipc": (6, 7)}, most)) == []
    assert list(exceeded({"core": (11, 5)}, most)) == ["core has 11 lines, 1 more than its budget of 10"]
    assert list(exceeded({"core": (10, 6)}, most)) == ["core has 6 statements, 1 more than its budget of 5"]
    assert len(list(exceeded({"new": (1, 1)}, most))) == 2
