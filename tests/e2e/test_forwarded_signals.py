"""``--ft-forward-signals``: passed on to the rank processes, and nothing ends of it."""

from __future__ import annotations

import os
import signal

from megatron_ft.link.linux.processes import would_end_by
from tests.e2e.test_launcher_signals import QUICK_S, ended_after
from tests.support.launching import Launcher, wait_until

TWO = ("--nproc-per-node", "2")
FORWARD = "--ft-forward-signals=SIGUSR1,SIGUSR2"


def test_signals_reach_ranks_that_have_a_handler_and_end_nothing(launcher: Launcher) -> None:
    script = """
child = os.fork()
if child == 0:
    signal.signal(signal.SIGUSR1, lambda *a: say("child got it"))
    forever()
for number in (signal.SIGUSR1, signal.SIGUSR2)[RANK:]:
    signal.signal(number, lambda number, frame: say("got", RANK, signal.Signals(number).name))
say("ready", RANK)
while not os.path.exists("go"):
    time.sleep(0.01)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
sys.exit(3 if CYCLE == 0 and RANK == 0 else 0)
"""
    launched = launcher.start(script, *TWO, FORWARD, "--max-restarts=1")
    launched.wait_for("^ready", count=2)
    for count, number in ((1, signal.SIGUSR1), (3, signal.SIGUSR2), (4, signal.SIGUSR1)):
        launched.signal(number)
        launched.wait_for("^got", count=count)
    (launched.directory / "go").touch()
    finished = launched.wait()
    assert finished.code == 0
    assert "child" not in finished.out
    forwarded = [(e["signal"], e["local_ranks"], e.get("unready") or []) for e in launched.events("signal_forwarded")]
    assert forwarded == [("SIGUSR1", [0], [1]), ("SIGUSR2", [0, 1], []), ("SIGUSR1", [0], [1])]
    assert "local rank 1" in finished.lines[1]
    # an end after it isn't taken for one of our making
    assert launched.exits()[0] == (3, False)
    assert launched.ends() == [(0, "crash", "restart", 0), (None, None, "finish", 0)]


def test_forwarded_signal_during_the_rendezvous_is_dropped_and_sigterm_ends_at_once_with_1(launcher: Launcher) -> None:
    # a second node that never comes keeps this one waiting
    waiting = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    launched = launcher.start("pass", *waiting, FORWARD)
    wait_until(lambda: len(launched.monitor_pids()) == 1, 60)
    launched.signal(signal.SIGUSR2)
    launched.wait_for("SIGUSR2 dropped: no rank runs now")
    assert ended_after(launched, signal.SIGTERM) < QUICK_S
    finished = launched.wait()
    assert (finished.code, finished.lines[1:]) == (1, ["received SIGTERM"])


def test_process_with_the_default_action_alone_would_end_by_a_signal() -> None:
    pid = os.getpid()
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        assert would_end_by(pid, signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
        assert not would_end_by(pid, signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert not would_end_by(pid, signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        assert not would_end_by(pid, signal.SIGUSR1)
        assert not would_end_by(2**22, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
