"""The command by which a launcher has its node checked."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.processes.health_command import command_of


def test_the_launchers_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))

    def command(*options: str) -> str | None:
        line = parse([*options, __file__])
        return command_of(line.options, line.node_health_command, log_dir=str(tmp_path), ranks=8)

    assert command() is None
    assert command("--ft-node-health-command=true") == "true"
    both = command("--ft-node-health=disk", "--ft-node-health-command=echo fine; exit 5")
    assert both is not None
    words = shlex.split(both.splitlines()[0])
    assert words[-6:] == ["disk", "--ranks=8", "--bound=48", f"--directory={tmp_path}", "||", "exit"]
    assert both.endswith("\necho fine; exit 5")
