"""``--ft-log-level``: what each process of a job prints at which level."""

from __future__ import annotations

from tests.support.launching import Launcher
from tests.support.nodes import meeting_place, rendezvous_settings

SCRIPT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
client.shutdown_workload_monitoring()
"""
DEBUG = ("[ft_launcher] DEBUG: phase ", "[ft_monitor] DEBUG: ", "megatron-ft coordinator: DEBUG: ", "FT: DEBUG: rank 0")


def test_debug_shows_transitions_and_messages_of_all_processes(launcher: Launcher) -> None:
    alone = rendezvous_settings(last_call_s=1)  # one node of two: a process of its own coordinates the job
    finished = launcher.run(SCRIPT, *meeting_place("--nnodes=1:2"), alone, "--ft-log-level=DEBUG")
    assert finished.code == 0
    assert [start for start in DEBUG if f"\n{start}" not in finished.err] == []
    assert any(line.endswith("all ranks finished after 1 cycle") for line in finished.lines)
    assert "phase STARTING -> RUNNING" in finished.err


def test_error_shows_no_line_about_cycles_and_starts_no_second_fork_server(launcher: Launcher) -> None:
    finished = launcher.run(SCRIPT, *meeting_place("--nnodes=1"), "--ft-log-level=ERROR")
    assert (finished.code, finished.err) == (0, "")
    reasons = [each["reason"] or "" for each in launcher.launches[-1].events("fork_server")]
    assert not [reason for reason in reasons if reason.startswith("its orders have changed")], reasons
