"""What ranks of ``--run-path`` get to wait for each other."""

from __future__ import annotations

import os

import pytest

from megatron_ft.launcher.processes import ending_together


def test_pipe_of_a_nodes_ranks_is_theirs_alone() -> None:
    commands = [["numactl", "--membind=0", *ending_together.command("t.py", ["x"])] for _ in range(2)]
    with ending_together.wait_for_each_other(commands) as (variables, ends):
        assert variables == {"MEGATRON_FT_RUN_PATH": f"{ends[0]},{ends[1]}"}
        assert os.path.samestat(*map(os.fstat, ends))
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
