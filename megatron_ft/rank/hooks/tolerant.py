"""Calls of a client that can't end a training run: a hook out of order is worth one line, no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ft.core.errors import RankMonitorClientError
from megatron_ft.rank.base import say

__all__ = ["call", "end_section", "start_section"]


def start_section(client: Any, section: str) -> None:
    """Open a section. One that an exception left open, which the loop survived, is begun anew."""
    try:
        client.start_section(section)
    except RankMonitorClientError:
        end_section(client, section)
        call(client.start_section, section)


def end_section(client: Any, section: str) -> None:
    """Close a section."""
    call(client.end_section, section)


def call(method: Callable[..., Any], *args: Any) -> None:
    """Call a method; an error of the client is a warning."""
    try:
        method(*args)
    except (RankMonitorClientError, OSError) as error:
        say.warn(str(error))
