"""torchrun's options without torch, whose import takes longer than all tests of options."""

from __future__ import annotations

import argparse

from megatron_ft.config.torchrun import TORCHRUN_OPTIONS


def torchrun_parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's options, as unchecked texts."""
    parser = argparse.ArgumentParser()
    for each in TORCHRUN_OPTIONS.values():
        parser.add_argument(*each.spellings, action="store_true" if each.is_flag else "store")
    return parser
