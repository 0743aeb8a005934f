"""What launchers say before their nodes meet. Most is the same for all, and said by the first node's only."""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_ft.launcher.base import lines, log_directory
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.coordination.meeting_place import MeetingPlace

__all__ = ["sayer_for_all", "tell"]

_Say = Callable[[str], None]


def sayer_for_all(line: CommandLine, place: MeetingPlace, say: _Say) -> _Say:
    """For lines that all launchers of the job have alike: ``say``, or nothing where the first node's says them."""
    return say if line.says_all or place.is_first else lambda _text: None


def tell(line: CommandLine, place: MeetingPlace, log_dir: str | None, *, say: _Say, announce: _Say) -> None:
    """``announce``: as made by ``sayer_for_all``. A ``log_dir`` of None: no logs are written."""
    options = line.options
    for warning in options.warnings:
        say(f"warning: {warning}")
    announce(options.summary())
    if log_dir is not None:
        (announce if _is_everywhere(line) else say)(f"logs: {log_dir}")
        doubt = log_directory.doubt_about(log_dir)
        if doubt is not None:
            say(f"warning: {doubt}")
    if line.taken:
        announce(line.taken)
    if place.note:
        announce(place.note)
    if options.observe_only:
        announce(lines.OBSERVING_ONLY)


def _is_everywhere(line: CommandLine) -> bool:
    """Whether all nodes have a log directory of this name; else each makes one up."""
    given = (line.options.log_dir, line.namespace.log_dir, line.where.log_name)
    return any(name and name != os.devnull for name in given)
