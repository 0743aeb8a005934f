"""Text from outside (an exception, a rank's request, a file's name) as it may be shown to a person. Pure."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The same text in one line, harmless for a terminal.

    White space becomes spaces, so that nothing can pass for another line of ours; whatever else isn't printable
    (escape sequences, marks that turn the direction of writing, lone surrogates) is shown as Python escapes it.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else _escaped(each) for each in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
