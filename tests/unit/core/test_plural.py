"""Numbers and lists of things in a line."""

from __future__ import annotations

from megatron_ft.core.plural import counted, listed


def test_one_is_not_many() -> None:
    assert (counted(1, "node"), counted(0, "node"), counted(2, "node")) == ("1 node", "0 nodes", "2 nodes")


def test_of_many_the_first_ones_are_named() -> None:
    assert listed("abc", most=3) == "a, b, c"
    assert listed("abcd", most=3) == "a, b, c and 1 more"
    assert listed("abcde", most=3, joint="; ") == "a; b; c; and 2 more"
    assert listed([]) == ""
