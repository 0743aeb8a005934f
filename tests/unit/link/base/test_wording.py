"""Numbers, lists, iterations and text from outside, as a person reads them."""

from __future__ import annotations

import pytest

from megatron_ft.link.base.wording import listed, printable


def test_list_of_many_names_the_first_ones() -> None:
    assert listed("abc", most=3) == "a, b, c"
    assert listed("abcd", most=3) == "a, b, c and 1 more"
    assert listed("abcde", most=3, joint="; ") == "a; b; c; and 2 more"
    assert listed([]) == ""


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
def test_printable_text_has_nothing_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert printable(text) == shown
