"""Text from outside (an exception, a rank's request, a file's name) as it may be shown to a person. Pure."""

from __future__ import annotations

__all__ = ["printable", "shown"]

_SHOWN = 100


def printable(text: str) -> str:
    """The same text in one line, harmless for a terminal.

    White space becomes spaces, so that nothing can pass for another line of ours; whatever else isn't printable
    (escape sequences, marks that turn the direction of writing, lone surrogates) is shown as Python escapes it.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else _escaped(each) for each in text)


def shown(value: object) -> str:
    """Something a peer sent, for a line that a person reads: plain ASCII, and short whatever it is."""
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, (int, str)):
        text = ascii(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"a {type(value).__name__}"  # it may be nested so deep that to write it would fail


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
