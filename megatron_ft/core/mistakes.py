"""Words for a mistake of the user: what was given, and what may have been meant. Pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Refused", "nearest", "show"]


class Refused(ValueError):
    """A value that a field can't hold. The message is a hint to append to what is allowed, or empty."""


def show(value: object) -> str:
    """The value as it appears in a one-line message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"`, or the list of all candidates if none is near."""
    import difflib  # only needed once a user made a mistake

    known = list(candidates)
    folded = name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")
    by_folded = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    for guess in (folded, folded.removeprefix("ft_"), folded.removeprefix("ft_param_")):
        near = difflib.get_close_matches(guess, by_folded, n=1, cutoff=0.6)
        if near:
            return f" (did you mean {by_folded[near[0]]!r}?)"
    return f" (known: {', '.join(known)})"
