"""docs/api.md is what the docstrings say, and has every public name."""

from __future__ import annotations

import re

import pytest

from tests.support.api_page import MODULES, PAGE, page, prose, public_names


def test_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.api_page writes it anew"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_has_an_entry(module: str) -> None:
    part = PAGE.read_text().partition(f"\n## {module}\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^### (?:class )?(\w+)$", part, re.MULTILINE)
    assert entries
    assert set(entries) <= set(public_names(module))
    assert all(name in entries for name in public_names(module) if name.isidentifier() and name[0].islower())


def test_sections_of_a_docstring_become_lists() -> None:
    text = (
        "Do it with :func:`x`.\n\nArgs:\n    one: what\n        goes on\n    two: that\n\nRaises:\n    ValueError: no\n"
    )
    assert prose(text) == (
        "Do it with `x`.\n\n\n**Args:**\n\n- `one`: what\n  goes on\n- `two`: that\n\n"
        "\n**Raises:**\n\n- `ValueError`: no"
    )
