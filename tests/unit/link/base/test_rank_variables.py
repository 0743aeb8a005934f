"""Which process is a rank, by its environment."""

from __future__ import annotations

import pytest

from megatron_ft.link.base.rank_variables import is_set_for_ranks, is_the_rank, wants_watch

RANK = {"FT_ERROR_FILE": "/run/error-0.json", "TORCHELASTIC_ERROR_FILE": "/run/error-0.json"}


@pytest.mark.parametrize(
    ("changes", "is_rank"),
    [
        ({}, True),
        ({"RANK": "7", "WORLD_SIZE": "8"}, True),  # a restart within the process
        ({"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/attempt_0/0/error.json"}, False),
    ],
)
def test_process_with_another_error_file_is_no_rank(changes: dict[str, str], is_rank: bool) -> None:
    environment = {**RANK, "FT_WATCH_COLLECTIVES": "on", "WORLD_SIZE": "2", **changes}
    assert (is_the_rank(environment), wants_watch(environment)) == (is_rank, is_rank)
    assert is_the_rank({"TORCHELASTIC_ERROR_FILE": "/tmp/x.json"}), "torchrun alone"
    assert is_set_for_ranks("FT_ERROR_FILE")
