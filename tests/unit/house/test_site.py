"""The site of docs/ (mkdocs.yml): every page is in its navigation, and the repository has one address everywhere."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
HOME = re.search(r'^Homepage = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


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


def test_repository_has_one_address() -> None:
    assert HOME is not None
    assert SITE["repo_url"] == HOME[1]
    texts = [path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *(ROOT / "docs").rglob("*.md"))]
    owner = HOME[1].removeprefix("https://github.com/")
    ours = {found for text in texts for found in re.findall(r"github\.com/([\w-]+/megatron-ft)", text)}
    assert ours == {owner}
