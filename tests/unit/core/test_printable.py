"""Text from outside, as a person is shown it. Pure."""

from __future__ import annotations

import sys

import pytest

from megatron_ft.core.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 3 (größer, 速い)", "rank 3 (größer, 速い)"),
        ("two\nlines\r\tand\u2028more", "two lines  and more"),
        ("\x1b[2J\x07\x9b\x00", r"\x1b[2J\x07\x9b\x00"),
        ("a\u202eb\udc80\U000e0001", r"a\u202eb\udc80\U000e0001"),
        (r"C:\x1b", r"C:\x1b"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_character_comes_out_printable() -> None:
    assert printable("".join(map(chr, range(sys.maxunicode + 1)))).isprintable()
