"""Another user of the node: what he tries on a run, and that the run doesn't notice.

Everything is left as open as a careless user leaves it: no umask, logs and sockets below directories that all may
enter. The same things are tried as the owner, too, who must succeed: else a refusal would say nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.jobs import find_jobs
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.wire import connect, encode
from tests.support.launching import Launched, Launcher, command_line, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

STRANGER = 12345
REFUSALS = {"EACCES", "EPERM"}
DONE = "done"
CONNECTIONS = 300
"""More than a launcher holds at a time."""
HELLO = {"type": "hello", "cycle": 0, "rank": 0, "warmup_iterations": 1}
NO_UMASK = ("sh", "-c", 'umask 0; exec "$@"', "sh")
SCRIPT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
say("connected", CYCLE, RANK, os.environ["MASTER_PORT"])
while not os.path.exists(sys.argv[1]):
    client.send_heartbeat()
    time.sleep(0.02)
if CYCLE == 0 and RANK == 0:
    raise ValueError("for the evidence")
client.shutdown_workload_monitoring()
"""
Attempt = tuple[str, Callable[[], object]]


@pytest.fixture
def open_launcher() -> Iterator[Launcher]:
    """As ``launcher``, in a directory that everybody may enter: pytest's own are closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        factory = Launcher(Path(directory))
        try:
            yield factory
        finally:
            for launched in factory.launches:
                launched.destroy()


def as_stranger(function: Callable[[], Any]) -> Any:
    """What a function returns (as JSON has it) in a process of another user."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):  # nothing of pytest may go on in here
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.write(write, json.dumps(function()).encode())
            status = 0
        os._exit(status)
    os.close(write)
    with open(read) as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0, text
    return json.loads(text)


def outcomes(attempts: list[Attempt]) -> dict[str, str]:
    """What became of each."""
    found = {}
    for name, attempt in attempts:
        try:
            attempt()
            found[name] = DONE
        except OSError as error:
            found[name] = errno.errorcode[error.errno or 0]
    return found


def connect_to(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(path))


def signal_by_pidfd(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


def boards_of(pids: list[int]) -> list[str]:
    """Where in /proc the boards of the job are to be had."""
    paths = [f"/proc/{pid}/fd/{fd}" for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")]
    return [path for path in paths if "megatron_ft_board" in os.readlink(path)]


def harmless(run_dir: Path, pids: list[int]) -> list[Attempt]:
    """What a look costs nobody anything, and its owner can have."""
    attempts: list[Attempt] = [
        ("list the run directory", lambda: os.listdir(run_dir)),
        ("enter it", lambda: os.stat(f"{run_dir}/.")),
    ]
    attempts.append(("read who owns it", lambda: (run_dir / "owner").read_text()))
    for path in run_dir.glob("*.sock"):
        attempts.append((f"connect to {path.name}", lambda path=path: connect_to(path)))
    for path in boards_of(pids):
        attempts.append((f"open the board {path}", lambda path=path: os.close(os.open(path, os.O_RDWR))))
    for pid in pids:
        attempts.append((f"signal {pid}", lambda pid=pid: os.kill(pid, 0)))
        attempts.append((f"signal {pid} by its pidfd", lambda pid=pid: signal_by_pidfd(pid)))
        for name in ("mem", "environ"):
            path = f"/proc/{pid}/{name}"
            attempts.append((f"open {path}", lambda path=path: os.close(os.open(path, os.O_RDONLY))))
        attempts.append((f"list /proc/{pid}/fd", lambda pid=pid: os.listdir(f"/proc/{pid}/fd")))
    return attempts


def harmful(launched: Launched, run_dir: Path, pids: list[int]) -> list[Attempt]:
    """What would end the job, or stand in its way."""
    trap = str(launched.directory)
    attempts: list[Attempt] = [
        ("rename the run directory", lambda: os.rename(run_dir, f"{run_dir}-mine")),
        ("put something in it", lambda: os.symlink(trap, run_dir / "monitor-7.sock")),
        ("put something among the logs", lambda: os.symlink(trap, launched.log_dir / "evidence")),
        ("rename the logs", lambda: os.rename(launched.log_dir, f"{launched.log_dir}-mine")),
    ]
    for path in run_dir.iterdir():
        attempts.append((f"remove {path.name}", lambda path=path: os.unlink(path)))
    for pid in pids:
        for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
            attempts.append((f"{number.name} for {pid}", lambda pid=pid, number=number: os.kill(pid, number)))
            group = os.getpgid(pid)
            name = f"{number.name} for the group of {pid}"
            attempts.append((name, lambda group=group, number=number: os.killpg(group, number)))
    return attempts


def flood(paths: list[Path]) -> list[int]:
    """Many connections to each socket, all held, each with an order. How many of them hear anything but the end."""
    heard = []
    for path in paths:
        held = []
        for _ in range(CONNECTIONS):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(20)
            held.append(sock)
            with contextlib.suppress(OSError):
                sock.connect(str(path))
                sock.sendall(encode({"type": "pause"} if path.name == "launcher.sock" else HELLO))
        for sock in held:
            with contextlib.suppress(OSError):  # a reset is an end, too
                heard += [len(data)] if (data := sock.recv(100)) else []
    return heard


def sockets_of(pids: list[int]) -> dict[int, int]:
    """Which process holds a socket, by inode."""
    found = {}
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
                if kind == "socket":
                    found[int(number.strip("[]"))] = pid
    return found


def bound_names(inodes: dict[int, int]) -> set[str]:
    """Names of those that are Unix sockets; of an abstract one it begins with @."""
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {words[7] for words in lines if len(words) == 8 and int(words[6]) in inodes}


def listening(inodes: dict[int, int]) -> set[tuple[int, int]]:
    """(process, port) of those that are reached by TCP."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[9]) in inodes:
                found.add((inodes[int(fields[9])], int(fields[1].rpartition(":")[2], 16)))
    return found


def test_another_user_is_refused_and_the_job_runs_to_its_end(open_launcher: Launcher) -> None:
    launcher = open_launcher
    flag = launcher.directory / "flag"
    launched = launcher.start(
        SCRIPT, "--nproc-per-node=2", "--max-restarts=1", script_args=[str(flag)], prefix=NO_UMASK
    )
    os.chmod(launched.temp_dir, 0o1777)  # as /tmp
    (port, _) = launched.wait_for(r"^connected 0 \d (\d+)", count=2)
    (run_dir,) = [Path(path) for path in os.scandir(launched.temp_dir) if path.name.startswith("megatron_ft-")]
    alive = launched.alive()
    pids = [stat.pid for stat in alive]
    assert len(pids) >= 6  # the launcher, its fork server, two monitors and two ranks
    assert len(boards_of(pids)) >= 2

    # nothing is reached but through the run directory, and through torch's own store
    inodes = sockets_of(pids)
    names = bound_names(inodes)
    assert names == {str(path) for path in run_dir.glob("*.sock")}
    assert len(names) == 4
    by_tcp = listening(inodes)
    assert (launched.process.pid, int(port)) in by_tcp
    # torch's: the store of the ranks
    assert [pid for pid, _ in by_tcp] == [launched.process.pid]

    attempts = harmless(run_dir, pids)
    assert set(outcomes(attempts).values()) == {DONE}, "the owner can"
    attacks = harmful(launched, run_dir, pids)
    refused = as_stranger(lambda: outcomes(attempts + attacks))
    assert len(refused) == len(attempts) + len(attacks)
    assert {name: outcome for name, outcome in refused.items() if outcome not in REFUSALS} == {}
    assert as_stranger(lambda: [job.launcher_pid for job in find_jobs()]) == []

    # even where the kernel lets him in
    os.chmod(run_dir, 0o755)
    sockets = list(run_dir.glob("*.sock"))
    for path in sockets:
        os.chmod(path, 0o666)
    assert as_stranger(lambda: flood(sockets)) == []
    # fork servers come and go
    assert {read_stat(stat.pid) is not None for stat in alive if stat.comm != "ft_fork_server"} == {True}
    os.chmod(run_dir, 0o700)

    flag.touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert [line for line in finished.lines if "ended" in line] == [
        line for line in finished.lines if "raised ValueError: for the evidence" in line
    ]
    assert "warning" not in finished.err
    assert "paused" not in finished.err
    launched.assert_nothing_left()

    files = [path for path in launched.log_dir.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".jsonl", ".txt", ".json"}
    for path in [launched.log_dir, *launched.log_dir.rglob("*")]:
        assert path.is_relative_to(launched.log_dir / "ranks") or not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    reads: list[Attempt] = [(str(path), lambda path=path: path.read_bytes()) for path in files]
    assert set(outcomes(reads).values()) == {DONE}
    assert set(as_stranger(lambda: outcomes(reads)).values()) <= REFUSALS


def test_a_log_directory_of_another_user_is_used_and_told_of(open_launcher: Launcher) -> None:
    his = open_launcher.directory / "his"
    his.mkdir()
    os.chown(his, STRANGER, STRANGER)
    finished = open_launcher.run("pass", "--ft-log-dir", str(his), prefix=NO_UMASK)
    assert finished.code == 0
    (warning,) = [line for line in finished.lines if "warning" in line]
    assert warning.startswith(f"warning: the log directory {his} belongs to another user (uid {STRANGER}), who may ")
    files = [path for path in his.rglob("*") if path.is_file()]
    assert files
    assert set(as_stranger(lambda: outcomes([(str(path), path.read_bytes) for path in files])).values()) <= REFUSALS


def test_job_directory_of_another_user_is_not_taken_for_a_job(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        path = os.path.join(directory, "launcher.sock")

        def found(user: int) -> bool:
            """Whether what looks like a monitor, of a launcher with our pid, is taken for one."""
            options = ["--launcher-fd", "9", "--listen-fd", "8", "--socket", f"{directory}/monitor-0.sock"]
            options += ["--run-id", "x", "--parent", str(os.getpid()), "--local-rank", "0"]
            command = ["sh", "-c", "read line", "sh", *options]
            with subprocess.Popen(command, user=user, group=user, extra_groups=[], stdin=subprocess.PIPE) as process:
                wait_until(lambda: command_line(process.pid) == command, 10)
                return any(job.run_dir == directory for job in find_jobs())

        # a listener keeps the credentials of the one that made it
        def listen_here() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            sock.listen()
            os.chmod(path, 0o666)
            return sock

        with listen_here():
            assert found(0)
            assert not found(STRANGER)
            connect(path, 5.0).close()
        os.unlink(path)
        os.setegid(STRANGER)
        os.seteuid(STRANGER)
        try:
            sock = listen_here()
        finally:
            os.seteuid(0)
            os.setegid(0)
        with sock, pytest.raises(ProtocolError, match=f"peer runs as user {STRANGER}, expected 0"):
            connect(path, 5.0)
