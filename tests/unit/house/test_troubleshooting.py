"""docs/troubleshooting.md has every line that the launcher, a rank or the coordinator can print."""

from __future__ import annotations

from tests import ROOT
from tests.support.printed_lines import GOLDEN, golden, printed_lines

PAGE = ROOT / "docs" / "troubleshooting.md"


def words(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def test_every_printed_line_is_explained() -> None:
    page, found = words(PAGE.read_text()), printed_lines()
    missing = {text: where for text, where in found.items() if words(text) not in page}
    assert missing == {}, "say in docs/troubleshooting.md what each means, and what to do"


def test_lines_are_those_of_the_golden_file() -> None:
    assert golden() == GOLDEN.read_text(), "python -m tests.support.printed_lines writes the file anew; read its diff"
