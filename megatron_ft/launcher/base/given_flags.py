"""Flags as they were written on the command line, known before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.config.config import OPTIONS
from megatron_ft.config.option import Option, spellings
from megatron_ft.config.reference import IGNORED
from megatron_ft.config.torchrun import TORCHRUN_OPTIONS, TorchrunOption


@dataclass(frozen=True)
class GivenFlag:
    """A flag as it was written; ``dest`` is empty for an option that isn't in this package's tables."""

    dest: str
    word: str
    value: str | None = None
    """Text after the flag; None for a flag without a value."""


def given_flags(words: Sequence[str]) -> tuple[list[GivenFlag], list[str]]:
    """Return the flags of a command line, and the script with its arguments. Only torchrun's may be abbreviated."""
    every: list[Option | TorchrunOption] = [*TORCHRUN_OPTIONS.values(), *OPTIONS.values()]
    known = {word: (each.dest, each.is_flag) for each in every for word in each.spellings}
    for name in IGNORED:
        known |= dict.fromkeys((*spellings(f"ft-param-{name}"), *spellings(f"ft-{name}")), (f"ft_{name}", False))
    rest, flags = list(words), []
    while rest and rest[0].startswith("-"):
        word, equals, value = rest.pop(0).partition("=")
        if not word.startswith("--") and len(word) > 2:  # -r3
            word, equals, value = word[:2], "=", word[2:]
        meant = known.get(word) or next(
            (known[each] for torchs in TORCHRUN_OPTIONS.values() for each in torchs.spellings if each.startswith(word)),
            ("", False),
        )
        if not meant[1] and not equals:
            value = rest.pop(0) if rest else ""
        flags.append(GivenFlag(meant[0], word, None if meant[1] else value))
    return flags, rest
