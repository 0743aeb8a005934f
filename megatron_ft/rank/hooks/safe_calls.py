"""Client calls whose errors become warnings: a hook out of order must not end a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ft.errors import RankMonitorClientError
from megatron_ft.rank.base import say


def start_section(client: Any, section: str) -> None:
    """Open a section. A section left open by an exception that the loop survived is closed first."""
    try:
        client.start_section(section)
    except RankMonitorClientError:
        end_section(client, section)
        call(client.start_section, section)


def end_section(client: Any, section: str) -> None:
    call(client.end_section, section)


def call(method: Callable[..., Any], *args: Any) -> None:
    """Call a method of a client, turning RankMonitorClientError and OSError into a warning."""
    try:
        method(*args)
    except (RankMonitorClientError, OSError) as error:
        say.warn(str(error))
