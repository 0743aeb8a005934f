"""Ranks of ``--run-path`` exit together, as torchrun's do."""

from __future__ import annotations

import pytest

from tests.support.launching import Finished, Launcher

TWO = ("--run-path", "--nproc-per-node=2")
TELLS_ITS_EXIT = "import atexit; atexit.register(say, 'exit', RANK)\n"
RANK_1_IS_LATE = "if RANK == 1: time.sleep(1.5); say('end 1')\n"


def lines(finished: Finished) -> list[str]:
    return [line for line in finished.out.splitlines() if line.startswith(("end", "exit", "file"))]


def test_rank_exits_after_the_scripts_of_all_ranks_have_ended(launcher: Launcher) -> None:
    script = f"{TELLS_ITS_EXIT}{RANK_1_IS_LATE}if RANK == 2: sys.exit(0)"
    finished = launcher.run(script, "--run-path", "--nproc-per-node=3")
    assert finished.code == 0
    assert lines(finished)[0] == "end 1"
    assert set(lines(finished)[1:]) == {"exit 0", "exit 1", "exit 2"}


@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 0), ("sys.exit(3)", 1)])
def test_rank_does_not_wait_for_a_rank_that_is_gone(launcher: Launcher, end: str, code: int) -> None:
    finished = launcher.run(f"if RANK == 1: {end}", *TWO)
    assert finished.code == code
    assert finished.seconds < 30


def test_rank_searches_for_modules_where_its_launcher_does(fresh_launcher: Launcher) -> None:
    """As torchrun's ranks: for a launcher started by ``-m`` that is the working directory, named in full."""
    finished = fresh_launcher.run("say('file', sys.path[0] == os.getcwd(), '' in sys.path)", "--run-path")
    assert lines(finished) == ["file True False"]


def test_descriptors_that_took_the_place_of_closed_ones_stay_the_users(launcher: Launcher) -> None:
    script = """
    import atexit
    os.closerange(3, 200)
    files = [os.open(f"file{RANK}.{i}", os.O_RDWR | os.O_CREAT) for i in range(100)]
    atexit.register(lambda: say("files", sum(os.fstat(each).st_size == 0 for each in files)))
    """
    finished = launcher.run("\n".join(line.strip() for line in script.splitlines()), *TWO)
    assert finished.code == 0
    assert lines(finished) == ["files 100", "files 100"]


def test_rank_that_waits_for_the_others_is_not_hung_and_a_process_left_behind_is_not_waited_for(
    launcher: Launcher,
) -> None:
    script = """
if RANK == 0 and os.fork() == 0:
    os.setsid()
    while not os.path.exists("over"): time.sleep(0.1)
    os._exit(0)
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
sys.modules["kept"] = client
for _ in range(1 + RANK * 50):
    with client.section("step"): time.sleep(0.1)
"""
    timeouts = ("--ft-rank_section_timeouts=step:60", "--ft-rank_out_of_section_timeout=2")
    launched = launcher.start(script, *TWO, *timeouts)
    assert launched.wait().code == 0
    (launched.directory / "over").touch()
    launched.assert_nothing_left()
