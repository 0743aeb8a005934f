"""A script that imports the reference's client, unchanged, under our launcher."""

from __future__ import annotations

from tests.support.launching import Launcher

SCRIPT = """
import multiprocessing
import nvidia_resiliency_ext
import nvidia_resiliency_ext.fault_tolerance as fault_tolerance

def in_child():
    print("a spawned process has", fault_tolerance.RankMonitorClient.__module__, flush=True)

if __name__ == "__main__":
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    has_said = os.path.join(os.path.dirname(__file__), "has_said")
    if RANK == 0:
        open(has_said, "w").close()
    while not os.path.exists(has_said):
        time.sleep(0.01)
    client.start_section("step")
    if (RANK, CYCLE) == (1, 0):
        time.sleep(60)
    client.end_section("step")
    client.shutdown_workload_monitoring()
    if RANK == 0:
        child = multiprocessing.get_context("spawn").Process(target=in_child)
        child.start()
        child.join()
"""
OPTIONS = ("--ft-rank_section_timeouts=step:1", "--max-restarts=1")
NOTICE = "FT: imports of nvidia_resiliency_ext.fault_tolerance get megatron_ft "


def test_hang_under_the_reference_client_is_noticed_with_one_notice(launcher: Launcher) -> None:
    ended = launcher.run(SCRIPT, *OPTIONS, "--nproc-per-node=2")
    assert ended.code == 0, ended.err
    assert "rank 1 hung in 'step'" in ended.err
    assert ended.err.count(NOTICE) == 1
    assert "a spawned process has megatron_ft.integrations.reference_client" in ended.out


def test_reference_import_when_switched_off_finds_the_installed_package(launcher: Launcher) -> None:
    ended = launcher.run(SCRIPT, "--ft-rank_section_timeouts=step:1", "--ft-reference-names=off")
    assert ended.code == 1
    assert "No module named 'nvidia_resiliency_ext'" in ended.err
    assert NOTICE not in ended.err
