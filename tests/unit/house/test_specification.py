"""docs/specification.md names code and tests that exist, are about what the sentence names, and check something."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ROOT
from tests.support.pages import cell_words

ROUNDS = ("keep", "drop")
NO_TEST = "none yet"
MOST_WORDS = 25

ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs" / "specification.md").read_text().partition("\n## Where this differs")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| sentence")
]
KEPT = [row[:3] for row in ROWS if row[-1] == "keep"]
"""Rows whose code and tests have to be there. Those of dropped sentences go at any time."""


def test_every_row_is_one_sentence_that_is_kept_or_dropped() -> None:
    assert len(KEPT) >= 400
    assert [row for row in ROWS if len(row) != 4 or row[3] not in ROUNDS or cell_words(row[0]) > MOST_WORDS] == []
    sentences = [row[0] for row in ROWS]
    assert [each for each in sentences if sentences.count(each) > 2] == []


def test_every_row_names_code_and_a_test_that_exist() -> None:
    for sentence, code, tests in KEPT:
        for name in re.findall(r"`([^`]+)`", code):
            assert (ROOT / name).exists() or (ROOT / "megatron_ft" / name).exists(), (sentence, name)
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named or tests == NO_TEST, sentence
        for path, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (sentence, path, test)


def code_of(cell: str) -> list[Path]:
    names = re.findall(r"`([^`]+)`", cell)
    return [path for name in names for path in (ROOT / name, ROOT / "megatron_ft" / name) if path.is_file()]


def missing_names(sentence: str, text: str) -> list[str]:
    """Options, methods and files that a sentence names in backticks, and a text doesn't."""
    words = {
        word for quoted in re.findall(r"`([^`]+)`", sentence) for word in re.findall(r"[A-Za-z_][\w-]{3,}", quoted)
    }
    plain = text.replace("-", "_")
    return sorted(word for word in words - {"ft_launcher"} if word.replace("-", "_").removeprefix("ft_") not in plain)


def test_code_or_test_of_a_row_is_about_what_its_sentence_names() -> None:
    for sentence, code, tests in KEPT:
        paths = [*code_of(code), *(ROOT / path for path in re.findall(r"`([\w/.]+)::", tests))]
        assert missing_names(sentence, "".join(path.read_text() for path in paths)) == [], sentence
