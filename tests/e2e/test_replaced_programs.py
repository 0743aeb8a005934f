"""A rank whose process runs another program after it has connected, or has closed our descriptors."""

from __future__ import annotations

from tests.support.launching import Launcher

TIMEOUTS = ("--ft-rank-section-timeouts=step:1", "--ft-rank-out-of-section-timeout=1")
CONNECTED = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
"""


def test_rank_that_executes_its_script_again_is_monitored_again(launcher: Launcher) -> None:
    script = f"""
{CONNECTED}
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv])
say("connected again")
client.start_section("step")
forever()
"""
    finished = launcher.start(script, *TIMEOUTS).wait()
    assert "connected again" in finished.out
    (line,) = (line for line in finished.lines if line.startswith("cycle 0 ended"))
    assert "rank 0 hung in 'step'" in line


def test_second_client_is_refused_another_program_is_not_hung_and_files_under_our_numbers_are_left_alone(
    launcher: Launcher,
) -> None:
    script = f"""
{CONNECTED}
if RANK == 0:
    sys.stdout.flush()
    os.execv("/bin/sh", ["sh", "-c", "sleep 4; echo evaluation done"])
try:
    RankMonitorClient().init_workload_monitoring()
except Exception as error:
    say("refused", error)
client.start_section("step")
client.end_section("step")
os.closerange(3, 4096)
mine = [os.open(f"mine{{i}}", os.O_RDWR | os.O_CREAT) for i in range(12)]
client.calculate_and_set_section_timeouts(["step"], False)
client.send_heartbeat()
client.shutdown_workload_monitoring()
say("sizes", sum(os.fstat(fd).st_size for fd in mine))
"""
    timeouts = ("--ft-rank-section-timeouts=step:2", "--ft-rank-out-of-section-timeout=2")
    finished = launcher.start(script, "--nproc-per-node=2", *timeouts).wait()
    assert "is connected already" in finished.out
    assert "evaluation done" in finished.out
    assert "sizes 0" in finished.out, finished.err
    assert finished.code == 0
