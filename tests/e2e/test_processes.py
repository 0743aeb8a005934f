"""What the kernel reports of processes. Those of another user (sudo) can't be signalled, which is no error."""

from __future__ import annotations

import builtins
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.processes.health_command import HealthCheck
from megatron_ft.launcher.processes.worker import Termination, Worker
from megatron_ft.link import process_tree
from megatron_ft.link.linux import processes
from megatron_ft.link.linux.processes import ProcessStat, read_stat, signal_main_thread
from megatron_ft.link.reactor import Reactor
from tests.support.launching import wait_until

LEAVES_ONE = """
import os, sys, time
if os.fork() == 0:
    os.setpgid(0, 0)  # out of reach of a signal to the group, and still in the session
    print(os.getpid(), flush=True)
    time.sleep(600)
"""

Makes = Callable[[int], None]
Starts = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def of_another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makes]:
    """Makes signals to a process fail as if it were another user's; it is killed in the end."""
    pids: set[int] = set()
    send, kill = signal.pidfd_send_signal, os.kill

    def sent(pidfd: int, number: int) -> None:
        found = re.search(r"^Pid:\s+(\d+)", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
        if found is not None and int(found[1]) in pids:
            raise PermissionError
        send(pidfd, number)

    def killed(pid: int, number: int) -> None:
        if pid in pids:
            raise PermissionError
        kill(pid, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", sent)
    monkeypatch.setattr(os, "kill", killed)
    yield pids.add
    for pid in pids:
        kill(pid, signal.SIGKILL)


def test_leftover_of_another_user_is_reported_and_not_waited_for_again(
    of_another_user: Makes, reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-S", "-c", LEAVES_ONE], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    monkeypatch.setattr(process_tree, "children", lambda: {pid})  # a subreaper's
    of_another_user(pid)
    said: list[str] = []
    end = Termination(reactor, known_children=set, in_a_hurry=lambda: False, say=said.append, kill_wait_s=0.3)
    worker = Worker(0, rank.pid, os.pidfd_open(rank.pid), print, lambda code: setattr(rank, "returncode", code))
    wait_until(worker.poll_end, 10)
    end.clear([worker], leftover_grace_s=0.1, ask=False)
    assert worker.reaped
    (stuck,) = end.still_there([worker])
    assert (stuck.pid, stuck.is_anothers) == (pid, True)
    who = rf"process {pid} \(python\S*, state [RS], of another user\)"
    told = f"{who} still running 0.3 s after SIGKILL, not waiting any longer"
    assert len(said) == 1
    assert re.fullmatch(told, said[0])


def test_leftover_of_a_health_check_in_its_own_group_is_killed(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    monkeypatch.setattr(process_tree, "children", lambda: {int(path.read_text())})  # a subreaper's
    command = f"{shlex.join([sys.executable, '-S', '-c', LEAVES_ONE])} > {path}; until test -s {path}; do :; done"
    health = HealthCheck(command, timeout_s=30.0, reactor=reactor, known_children=set)
    assert health.run(0, {}, lambda: None).good
    assert health.pids() == set()
    wait_until(lambda: (stat := read_stat(int(path.read_text()))) is None or stat.state == "Z", 10)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Process ids that are hidden: with hidepid=1 of /proc, their directories are listed and can't be entered."""
    pids: set[int] = set()

    def hiding(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **options: Any) -> Any:
            if str(path).startswith(tuple(f"/proc/{pid}/" for pid in pids)):
                raise PermissionError
            return real(path, *more, **options)

        return call

    monkeypatch.setattr(builtins, "open", hiding(open))
    monkeypatch.setattr(os, "listdir", hiding(os.listdir))
    return pids


@pytest.mark.parametrize("lists_it", [True, False])  # hidepid=1, and 2
def test_a_hidden_leftover_of_a_rank_is_seen(
    hidden: set[int], lists_it: bool, monkeypatch: pytest.MonkeyPatch, start_process: Starts
) -> None:
    leader = start_process(["true"], start_new_session=True)
    left = start_process(preexec_fn=lambda: os.setpgid(0, 0))
    monkeypatch.setattr(os, "getsid", lambda pid: leader.pid if pid == left.pid else os.getpgid(pid))
    hidden.add(left.pid)
    if not lists_it:
        real = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: [name for name in real(path) if name != str(left.pid)])
    (found,) = process_tree.left_behind([leader.pid], set())
    assert (found.pid, found.is_anothers) == (left.pid, True)


def test_kill_without_a_free_descriptor_kills_nothing_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, start_process: Starts
) -> None:
    def none_left(_pid: int, _flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    child = start_process()
    stat = read_stat(child.pid)
    assert stat is not None
    monkeypatch.setattr(os, "pidfd_open", none_left)
    processes.kill_if_still(stat, lambda _stat: True)
    assert child.poll() is None


def test_stuck_processes_are_described_in_words() -> None:
    stat = ProcessStat(7, "sudo", "S", 1, 7, 7)
    assert launcher_lines.stuck([stat, stat._replace(is_anothers=True)]) == (
        "processes 7 (sudo, state S), 7 (sudo, state S, of another user)"
    )


WAITS = """
import signal, sys, threading
def take():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("thread" if signal.sigtimedwait([signal.SIGUSR1], 3) else "nobody", flush=True)
signal.signal(signal.SIGUSR1, lambda *_: print("main thread", flush=True) or sys.exit())
if sys.argv[1] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
thread = threading.Thread(target=take, daemon=True)
thread.start()
print("ready", flush=True)
thread.join()
"""


@pytest.mark.parametrize(("mask", "who"), [("open", "main thread"), ("blocked", "thread")])
def test_a_signal_reaches_the_main_thread_unless_that_blocks_it(mask: str, who: str) -> None:
    """A script may leave a signal to a thread of its own, which waits for it."""
    command = [sys.executable, "-S", "-c", WAITS, mask]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pidfd = os.pidfd_open(process.pid)
        assert signal_main_thread(process.pid, pidfd, signal.SIGUSR1)
        assert process.stdout.readline() == f"{who}\n"
        process.wait(20)
        assert not signal_main_thread(process.pid, pidfd, signal.SIGUSR1)
        os.close(pidfd)


def test_a_process_that_leads_no_group_yet_is_signalled_itself(start_process: Starts) -> None:
    """A rank that was forked a moment ago: to end its group would end nothing, and it would run on."""
    process = start_process()
    worker = Worker(
        0, process.pid, os.pidfd_open(process.pid), print, lambda code: setattr(process, "returncode", code)
    )
    worker.signal(signal.SIGKILL, whole_group=True)
    wait_until(worker.poll_end, 10)
    assert worker.exitcode == -signal.SIGKILL
    worker.signal(signal.SIGTERM, whole_group=True)  # nothing of it is left, and nobody minds
    worker.reap()
