"""State files of foreign clients, as tests and other packages pass them, by the reference's public calls."""

from __future__ import annotations

import json
import os
from typing import Any

from megatron_ft.ipc.files.state_file import write_state
from megatron_ft.rank.base import say


def load(client: Any, path: str) -> None:
    """Load the state from the file, if it exists."""
    if not os.path.exists(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError) as error:
        say.warn(f"{path} can't be read ({error}): continuing with the configured timeouts")
        return
    client.load_state_dict(state)


def save(client: Any, path: str) -> None:
    """Write the client's state to the file."""
    try:
        write_state(path, client.state_dict())
    except OSError as error:
        say.warn(f"{path} can't be written: {error.strerror or error}. A restart won't know these timeouts")
