"""Words in the cells of Markdown tables."""

from __future__ import annotations

import re

MAX_CELL_WORDS = 15


def cell_words(cell: str) -> int:
    """Return the number of words; a code span and a link are one word each."""
    return len(re.sub(r"!?\[[^\]]*\]\([^)]*\)", "link", re.sub(r"`[^`]*`", "code", cell)).split())
