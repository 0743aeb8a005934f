"""ft_launcher in torchrun's place: what torchrun makes of an option, however short, ft_launcher does."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import run as torchrun

from megatron_ft.config.files.options import add_ft_options
from megatron_ft.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.errors import ConfigError
from megatron_ft.launcher import arguments


def parsers() -> tuple[Any, Any]:
    """torchrun's parser, and the same with our options."""
    ours = torchrun.get_args_parser()
    add_ft_options(ours)
    return torchrun.get_args_parser(), ours


def meaning(parser: Any, text: str) -> set[str] | None:
    """What a word stands for; None where it is refused."""
    actions = parser._option_string_actions
    if text in actions:
        return {actions[text].dest}
    found = {each[0].dest for each in parser._get_option_tuples(text)}
    return found if len(found) == 1 else None


def test_every_abbreviation_means_what_it_means_for_torchrun() -> None:
    theirs, ours = parsers()
    beginnings = {option[:end] for option in ours._option_string_actions for end in range(3, len(option) + 1)}
    own = {option for option in ours._option_string_actions if option not in theirs._option_string_actions}
    assert len(own) > 100
    different = [text for text in beginnings - own if meaning(theirs, text) != meaning(ours, text)]
    assert different == []
    assert meaning(ours, "--te") == {"tee"}


def test_an_abbreviation_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --term-time"):
        arguments.parse(["--term-time=3", __file__])


def test_table_of_torchruns_options_is_complete() -> None:
    spellings = {word: each.is_flag for each in TORCHRUN_OPTIONS.values() for word in each.spellings}
    actions = torchrun.get_args_parser()._option_string_actions
    expected = {option: action.nargs == 0 for option, action in actions.items() if action.dest != "help"}
    # another torch may have fewer
    assert expected.items() <= spellings.items()
