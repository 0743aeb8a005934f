"""The site of docs/ (mkdocs.yml): every page is in its navigation."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]


def test_every_page_is_in_the_navigation_once() -> None:
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(SITE["nav"])) == sorted(there)


def test_index_links_every_page_of_the_navigation() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert {*pages(SITE["nav"])} - linked == {"index.md"}
