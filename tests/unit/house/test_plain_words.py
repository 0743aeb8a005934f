"""What a person reads says who does what: no page, no line of the terminal, no docstring speaks in riddles."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_ft
from tests import ROOT

PACKAGE = Path(megatron_ft.__file__).parent
RIDDLE = re.compile(
    r"\b(told of|looked at)\b"  # say who reports or checks it
    r"|\b(no|some|any|every)body\b|\bwhoever\b"  # say which node, rank or process
    r"|\bcounts? as finished\b|\bended as hung\b"  # treated as finished, terminated as hung
    r"|\b(be|been) had\b|\bbe heard\b|\bmade again\b|\ball the same\b"  # say what can't be done, or is done
    r"|\bst(an|oo)ds? aside\b|\beyes and hands\b|\bseen first on\b".replace(" ", r"\s+"),
    re.IGNORECASE,
)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def riddles(text: str) -> list[str]:
    """Lines in which such a phrase begins; what stands in backticks is a name."""
    lines = text.split("\n")
    plain = re.sub(r"`[^`\n]*`", "", text)
    return [lines[plain.count("\n", 0, found.start())].strip() for found in RIDDLE.finditer(plain)]


def strings(source: str, *, docstrings: bool) -> Iterator[str]:
    """All texts of a module; with or without docstrings and comments, which are for its readers."""
    if docstrings:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (docstrings or id(node) not in alone):
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    assert riddles(page.read_text()) == []


def test_the_package() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        texts = strings(path.read_text(), docstrings=True)
        lines = [line for text in texts for line in riddles(text)]
        if lines:
            found[name] = lines
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        *("hung ranks are told of, none is ended", "Nobody is judged", "this node stands aside"),
        *(
            "it isn't looked at before it joins",
            "the cause is everybody's",
            "a rank that takes longer is ended as hung",
        ),
        *(
            "the others have finished, so it counts as finished",
            "the ranks start all the same",
            "the evidence can't be had",
        ),
    ],
)
def test_a_riddle_is_found(line: str) -> None:
    assert riddles(f"well\n  {line}\n") == [line]
    assert list(strings(f'"""{line}"""\nsay("{line}")  # {line}', docstrings=False)) == [line]
    assert list(strings(f'"""{line}"""\nsay("")  # {line}', docstrings=True)) == [f"# {line}", line, ""]
    assert riddles(f"`test_{line}`") == []
    assert len(riddles("\n    ".join(line.split()))) == 1  # however the text is wrapped
