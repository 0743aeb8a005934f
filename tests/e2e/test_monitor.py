"""The monitor and the client, real processes, without a launcher and without torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft import FaultToleranceConfig, RankMonitorServer
from tests.support.launching import open_files, wait_until
from tests.support.monitored import PRELUDE, expect, monitor, rank

FOREVER = "while True: signal.pause()"  # the signal that asks for the stacks ends one of them


def pss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))


HUNG = "say('hung', time.monotonic())"
IN_STEP = f"client.start_section('step'); {HUNG}"
STEP = {"rank_section_timeouts": {"step": 0.4}}
THREADS = """
import threading
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(123))
for _ in range(16):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
"""A rank is stopped for its evidence: whichever thread runs first, only the main one can call Python's handler."""


@pytest.mark.parametrize(
    ("fields", "ended_by", "script", "code"),
    [
        (STEP, "SIGTERM", f"{IN_STEP}; os.kill(os.getpid(), signal.SIGSTOP)", -signal.SIGTERM),
        (STEP, "SIGTERM", f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {IN_STEP}", -signal.SIGKILL),
        (STEP, "SIGUSR1", f"{THREADS}{IN_STEP}", 123),
        ({"initial_rank_heartbeat_timeout": 0.4}, "SIGKILL", HUNG, -signal.SIGKILL),
        ({"rank_heartbeat_timeout": 0.4}, "SIGKILL", f"client.send_heartbeat(); {HUNG}", -signal.SIGKILL),
    ],
    ids=["stopped", "deaf", "many threads", "initial beat", "beat"],
)
def test_monitor_ends_each_kind_of_hung_rank_with_the_configured_signal_and_not_before_the_deadline(
    tmp_path: Path, fields: dict[str, object], ended_by: str, script: str, code: int
) -> None:
    path = tmp_path / ("d" * 100) / ("e" * 60) / "socket"  # longer than the name of a socket may be
    path.parent.mkdir(parents=True)
    with (
        monitor(path, rank_termination_signal=ended_by, **fields) as handle,
        rank(path, f"client.init_workload_monitoring()\n{script}\n{FOREVER}") as process,
    ):
        began = float(expect(process, "hung"))
        assert path.stat().st_mode & 0o777 == 0o600
        assert handle.pid is not None
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # a scheduler sends them to every process
            os.kill(handle.pid, number)
        assert process.wait(30) == code
        assert time.monotonic() - began >= 0.4
        assert handle.is_alive()
    wait_until(lambda: not path.exists())


def test_a_restarted_rank_reconnects_at_once_and_a_later_cycle_wins(tmp_path: Path) -> None:
    script = f"client.init_workload_monitoring()\nsay('there')\n{FOREVER}"
    with monitor(tmp_path / "s", rank_section_timeouts={"step": 1.0}):
        with rank(tmp_path / "s", script) as first:
            expect(first, "there")
        with rank(tmp_path / "s", script) as second:
            expect(second, "there")
            with rank(tmp_path / "s", script, {"FT_CYCLE": "1"}) as third:
                expect(third, "there")
                late = "try: client.init_workload_monitoring()\nexcept RankMonitorClientError as e: say('refused', e)"
                with rank(tmp_path / "s", late) as fourth:
                    assert "cycle 0 is over" in expect(fourth, "refused")


def test_a_rank_waits_for_a_socket_that_is_just_being_made_again(tmp_path: Path) -> None:
    """Chaos seed 434: a cleaner of /tmp removed the directory between the start of a rank and its hello."""
    with rank(tmp_path / "s", "say('begins')\nclient.init_workload_monitoring()\nsay('there')") as process:
        expect(process, "begins")
        with monitor(tmp_path / "s"):
            expect(process, "there")
            assert process.wait(20) == 0


def test_a_rank_that_gave_up_on_a_monitor_that_stood_still_may_try_again(tmp_path: Path) -> None:
    script = f"""
import socket
from megatron_ft.link.wire import encode
first = socket.socket(socket.AF_UNIX)
first.connect({str(tmp_path / "s")!r})
first.sendall(encode({{"type": "rank_hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}}))
first.close()
say('gave up')
sys.stdin.readline()
client.init_workload_monitoring()
client.start_section('step')
say('there')
{FOREVER}
"""
    with monitor(tmp_path / "s", rank_section_timeouts={"step": 0.5}) as handle:
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGSTOP)
        with rank(tmp_path / "s", script) as process:
            expect(process, "gave up")
            os.kill(handle.pid, signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            expect(process, "there")
            assert process.wait(20) == -signal.SIGKILL  # and is monitored


def test_init_shutdown_and_init_again_in_one_process_whose_forks_are_disarmed(tmp_path: Path) -> None:
    """A client that nobody holds any more has ended its monitoring, too."""
    script = f"""
for _ in range(3):
    client.init_workload_monitoring()
    try:
        client.init_workload_monitoring()
    except RankMonitorClientError as error:
        say('twice', error)
    client.start_section('step')
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()
def short_lived():
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section('step')
short_lived()
time.sleep(1.0)
other = RankMonitorClient()
other.init_workload_monitoring()
other.start_section('step')
if os.fork() == 0:
    try:
        other.end_section('step')
        os._exit(1)
    except RankMonitorClientError:
        os._exit(0 if not other.is_initialized else 2)
say('child', os.wait()[1])
say('hung')
{FOREVER}
"""
    with (
        monitor(tmp_path / "s", rank_section_timeouts={"step": 0.5}),
        rank(tmp_path / "s", script) as process,
    ):
        for _ in range(3):
            assert "initialized already" in expect(process, "twice")
        assert expect(process, "child") == "0"
        expect(process, "hung")
        assert process.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_hooks_neither_fail_nor_wait_when_the_monitor_is_dead_or_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = """
client.init_workload_monitoring()
client.start_section('step'); client.end_section('step')
say('ready')
sys.stdin.readline()
began = time.monotonic()
for i in range(1000):
    client.set_iteration(i)
    with client.section('step'): client.send_heartbeat()
client.calculate_and_set_section_timeouts()
client.calculate_and_set_hb_timeouts()
client.load_state_dict(client.state_dict())
client.shutdown_workload_monitoring()
say('took', time.monotonic() - began)
"""
    with (
        monitor(tmp_path / "s", rank_section_timeouts={"step": 100.0}) as handle,
        rank(tmp_path / "s", script) as process,
    ):
        expect(process, "ready")
        os.kill(handle.pid, number)
        if number == signal.SIGKILL:
            handle.join(10)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert float(expect(process, "took")) < 2.0
        assert process.wait(20) == 0
        os.kill(handle.pid, signal.SIGCONT) if number == signal.SIGSTOP else None


def test_lower_timeouts_count_at_once(tmp_path: Path) -> None:
    """Learned timeouts far below the configured ones must not wait for the monitor's next planned look."""
    script = f"""
client.init_workload_monitoring()
with client.section('step'): pass
client.calculate_and_set_section_timeouts(['step'], calc_out_of_section=False)
short = {{"section": {{"step": 0.2}}, "calculated_sections": ["step"]}}
client.load_state_dict({{"current_timeouts": {{"section": short}}}})
client.start_section('step')
say('hung', time.monotonic())
{FOREVER}
"""
    with (
        monitor(
            tmp_path / "s",
            rank_section_timeouts={"step": 600.0},
            workload_check_interval=60.0,
            learned_floor=1.0,
        ),
        rank(tmp_path / "s", script) as process,
    ):
        began = float(expect(process, "hung"))
        assert process.wait(30) == -signal.SIGKILL
        assert 1.0 <= time.monotonic() - began < 15.0  # the floor of what is learned


def test_the_config_of_the_server_reaches_the_client_and_later_changes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "1")
    config = FaultToleranceConfig(rank_section_timeouts={"a": 3.0, "b": None}, safety_factor=2.5)
    handle = RankMonitorServer.run_in_subprocess(config, str(tmp_path / "s"), env={"ADDED": "2"})
    config.safety_factor = 9.0
    try:
        script = """
client.init_workload_monitoring()
say(client.cfg.safety_factor, client.section_timeouts.section, client.cfg.is_set('log_level'))
"""
        with rank(tmp_path / "s", script) as process:
            assert expect(process, "2.5") == "{'a': 3.0, 'b': None} False"
        environ = Path(f"/proc/{handle.pid}/environ").read_bytes().split(b"\0")
        assert {b"OF_THE_CALLER=1", b"ADDED=2"} <= set(environ)
    finally:
        handle.terminate()
        handle.join(10)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace isn't installed")
def test_hooks_of_the_hot_path_make_no_system_call(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
client.init_workload_monitoring()
with client.section('step'): client.send_heartbeat()
os.write(1, b'begin')
for i in range(3000):
    client.set_iteration(i)
    client.start_section('step')
    client.send_heartbeat()
    client.end_section('step')
os.write(1, b'end')
"""
    )
    trace = tmp_path / "trace"
    with monitor(tmp_path / "s", rank_section_timeouts={"step": 60}):
        command = ["strace", "-o", str(trace), sys.executable, "-c", script]  # the thread of the hooks alone
        environment = {**os.environ, "FT_RANK_MONITOR_IPC_SOCKET": str(tmp_path / "s")}
        subprocess.run(command, env=environment, check=True, capture_output=True)
    text = trace.read_text()
    between = text[text.index('"begin"') : text.index('"end"')].splitlines()[1:-1]
    # the interpreter hands itself to a thread that has asked for it: on a busy machine once or twice in 12,000 hooks
    handovers = [line for line in between if line.startswith("futex(") and "FUTEX_WA" in line]
    assert [line for line in between if line not in handovers] == []
    assert len(handovers) <= 12


def sockets_of(pid: int) -> int:
    return sum(target.startswith("socket:") for target in open_files(pid))


def test_monitors_are_small_know_neither_torch_nor_numpy_and_do_not_talk_to_each_other(tmp_path: Path) -> None:
    """A monitor holds open the socket it listens at, one to its rank, and, under a launcher, one to that."""
    script = f"client.init_workload_monitoring()\nsay('there')\n{FOREVER}"
    with monitor(tmp_path / "a") as first, rank(tmp_path / "a", script) as one:
        expect(one, "there")
        mapped = Path(f"/proc/{first.pid}/maps").read_text()
        assert [name for name in ("torch", "numpy") if name in mapped] == []
        assert pss_kib(first.pid) <= 15 * 1024
        with monitor(tmp_path / "b") as second, rank(tmp_path / "b", script) as other:
            expect(other, "there")
            for handle in (first, second):
                # the connection of the hello may just be closing
                wait_until(lambda handle=handle: sockets_of(handle.pid) == 2, 5)
