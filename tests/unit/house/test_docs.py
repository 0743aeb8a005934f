"""Pages of docs/: short cells in tables, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.pages import MAX_CELL_WORDS, cell_words

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WITH_LONGER_CELLS = "specification.md"
"""One promise a row; `test_specification.py` bounds it."""
WITH_SHORT_CELLS = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != WITH_LONGER_CELLS),
]
FOLDERS_THAT_NAME_PAGES = ("megatron_ft", "tests", "examples")


def long_cells(text: str) -> list[str]:
    """Return the cells of a page's tables that have too many words."""
    rows = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if cell_words(cell) > MAX_CELL_WORDS]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    found: list[str] = []
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of one."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", WITH_SHORT_CELLS, ids=lambda page: page.name)
def test_table_cells_have_at_most_15_words(page: Path) -> None:
    assert long_cells(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_pages_named_in_code_exist() -> None:
    texts = {path: path.read_text() for each in FOLDERS_THAT_NAME_PAGES for path in (ROOT / each).rglob("*.*")
             if path.suffix in (".py", ".yaml", ".sh")}  # fmt: skip
    named = {name for text in texts.values() for name in re.findall(r"\bdocs/[a-z/-]+\.md\b", text)}
    assert len(named) > 10
    assert {name for name in named if not (ROOT / name).is_file()} == set()
