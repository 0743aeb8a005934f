"""docs/api.md is what the docstrings say, and has every public name."""

from __future__ import annotations

from tests.support.api_page import PAGE, page


def test_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.api_page writes it anew"
