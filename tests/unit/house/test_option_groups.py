"""Groups of options in the help of ``ft_launcher``."""

from __future__ import annotations

from megatron_ft.core.config.config import FIELDS
from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.option_groups import FIRST, GROUPS
from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS

GROUPED = [name for names in GROUPS.values() for name in names]


def test_every_option_is_in_one_group() -> None:
    options = {each.dest for each in (*FIELDS.values(), *LAUNCHER_OPTIONS.values(), *TORCHRUN_OPTIONS.values())}
    assert sorted(GROUPED) == sorted(options), "core/config/option_groups.py says where --help-all shows an option"


def test_first_options_are_ten() -> None:
    assert len(FIRST) == 10
    assert set(FIRST) <= set(GROUPED)
