"""Ranks of ``--run-path`` exit together, as torchrun's do."""

from __future__ import annotations

from tests.support.launching import Launcher

ROLES = """
import atexit
if RANK == 0:
    say("path", sys.path[0] == os.getcwd(), "" in sys.path)
    if os.fork() == 0:  # a process left behind
        os.setsid()
        while not os.path.exists("over"): time.sleep(0.1)
        os._exit(0)
if RANK < 2:
    atexit.register(say, "exit", RANK)
    from megatron_ft import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    sys.modules["kept"] = client
    for _ in range(1 + RANK * 40):
        with client.section("step"): time.sleep(0.1)
    say("end", RANK)
    sys.exit(0)
if RANK == 2:
    os._exit(0)
os.closerange(3, 200)
files = [os.open(f"file{i}", os.O_RDWR | os.O_CREAT) for i in range(100)]
atexit.register(lambda: say("files", sum(os.fstat(each).st_size == 0 for each in files)))
"""


def test_rank_exits_after_the_scripts_of_all_ranks_have_ended(fresh_launcher: Launcher) -> None:
    """One that waits is not hung. A rank that is gone, and a process left behind, are not waited for.

    Files that took the place of closed descriptors of ours stay the user's. The path is that of torchrun's ranks: for a
    launcher that is started by ``-m`` it begins with the working directory, named in full.
    """
    timeouts = ("--ft-rank_section_timeouts=step:60", "--ft-rank_out_of_section_timeout=2")
    launched = fresh_launcher.start(ROLES, "--run-path", "--nproc-per-node=4", *timeouts)
    finished = launched.wait()
    assert finished.code == 0, finished.err
    lines = [line for line in finished.out.splitlines() if not line.startswith(("path", "files"))]
    assert lines[:2] == ["end 0", "end 1"]
    assert {*lines[2:]} == {"exit 0", "exit 1"}
    assert {*finished.out.splitlines()} >= {"path True False", "files 100"}
    (launched.directory / "over").touch()
    launched.assert_nothing_left()
