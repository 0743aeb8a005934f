"""docs/options.md is what the tables of options say."""

from __future__ import annotations

from tests.support.options_page import PAGE, page


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.options_page writes it anew"
