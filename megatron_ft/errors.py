"""Every error this package raises on purpose, and words for a mistake of the user.

FaultToleranceError
├── ConfigError (also a ValueError)     a user's mistake in the configuration or on the command line
├── RankMonitorClientError              a hook was called in a way the monitor can't follow
├── NotUnderLauncherError               a RankMonitorClientError: no ft_launcher, and FT_REQUIRE_LAUNCHER=1
├── SnapshotError                       a memory checkpoint that can't be saved or restored
│   └── LayoutError                     a segment of memory that holds no sound one
└── ProtocolError                       a peer on a socket or board that violates the protocol
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ft.link.base.wording import printable

_LONGEST_LINE = 1500


class FaultToleranceError(Exception):
    """Base of all errors of this package."""


class ConfigError(FaultToleranceError, ValueError):
    """A user error. The message is one line: what was given, and what is allowed."""

    def __init__(self, message: str = "") -> None:
        # the given value may contain anything, including line feeds and terminal control sequences
        line = printable(message)
        # argparse lists all options that an abbreviation may mean: more than a line should hold
        super().__init__(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...")


class RankMonitorClientError(FaultToleranceError):
    """Raised for a client call that can't be honoured; the call changed nothing."""


class NotUnderLauncherError(RankMonitorClientError):
    """Raised if the script wasn't started with ``ft_launcher`` and FT_REQUIRE_LAUNCHER is 1."""


class SnapshotError(FaultToleranceError):
    """Raised if a memory checkpoint can't be saved or restored; the message is one line."""


class LayoutError(SnapshotError):
    """Raised for a segment whose bytes aren't those of a whole snapshot."""


class ProtocolError(FaultToleranceError):
    """Raised for bytes that violate this package's protocol, or follow another version of it."""


class Refused(ValueError):
    """Raised for a value that a field can't hold; the caller raises a `ConfigError` that names the field.

    The message is a hint to append to what is allowed, or empty.
    """


def show(value: object) -> str:
    """Return the value for a one-line message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def near(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that was probably meant; None if none is near."""
    import difflib  # only needed after a user error

    folded = name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")
    by_folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    for guess in (folded, folded.removeprefix("ft_"), folded.removeprefix("ft_param_")):
        found = difflib.get_close_matches(guess, by_folded, n=1, cutoff=0.6)
        if found:
            return by_folded[found[0]]
    return None


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"`, or the list of all candidates if none is near."""
    known = list(candidates)
    found = near(name, known)
    return f" (known: {', '.join(known)})" if found is None else f" (did you mean {found!r}?)"
