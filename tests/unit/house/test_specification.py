"""docs/specification.md names code and tests that exist."""

from __future__ import annotations

import re

from tests import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "specification.md").read_text().partition("\n## Where this differs")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| sentence")
]


def test_every_row_names_code_and_a_test_that_exist() -> None:
    assert len(ROWS) >= 50
    for sentence, code, tests in ROWS:
        for name in re.findall(r"`([^`]+)`", code):
            assert (ROOT / name).exists() or (ROOT / "megatron_ft" / name).exists(), (sentence, name)
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named, sentence
        for path, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (sentence, path, test)
