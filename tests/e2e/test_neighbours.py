"""Another user of the node: what a run leaves open to him, and that it doesn't notice what he tries.

Everything is left as open as a careless user leaves it: no umask, logs and sockets below directories that all may
enter. What the kernel refuses follows from the modes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.status.jobs import find_jobs
from megatron_ft.errors import ProtocolError
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.wire import connect, encode
from tests.support.launching import Launcher, command_line, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

STRANGER = 12345
CONNECTIONS = {"keeper.sock": 20}
"""The keeper rests after each; the others get more than a launcher holds at a time."""
HELLO = {"type": "rank_hello", "cycle": 0, "rank": 0, "warmup_iterations": 1}
NO_UMASK = ("sh", "-c", 'umask 0; exec "$@"', "sh")
SCRIPT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
say("connected", CYCLE, RANK)
while not os.path.exists(sys.argv[1]):
    client.send_heartbeat()
    time.sleep(0.02)
if CYCLE == 0 and RANK == 0:
    raise ValueError("for the evidence")
client.shutdown_workload_monitoring()
"""


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


def flood(paths: list[Path]) -> list[int]:
    """Many connections to each socket, all held, each with an order. How many of them hear anything but the end."""
    heard = []
    for path in paths:
        held = []
        for _ in range(CONNECTIONS.get(path.name, 300)):
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


def sockets_of(pids: list[int]) -> set[int]:
    """Inodes of the sockets that these processes hold."""
    found = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
                if kind == "socket":
                    found.add(int(number.strip("[]")))
    return found


def bound_names(inodes: set[int]) -> set[str]:
    """Names of those that are Unix sockets; of an abstract one it begins with @."""
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {words[7] for words in lines if len(words) == 8 and int(words[6]) in inodes}


def test_another_user_is_refused_and_the_job_runs_to_its_end(open_launcher: Launcher) -> None:
    launcher = open_launcher
    flag = launcher.directory / "flag"
    launched = launcher.start(
        SCRIPT, "--nproc-per-node=2", "--max-restarts=1", script_args=[str(flag)], prefix=NO_UMASK
    )
    os.chmod(launched.temp_dir, 0o1777)  # as /tmp
    launched.wait_for(r"^connected 0 \d", count=2)
    (run_dir,) = [Path(path) for path in os.scandir(launched.temp_dir) if path.name.startswith("megatron_ft-")]
    alive = launched.alive()
    pids = [stat.pid for stat in alive]
    assert len(pids) >= 6  # the launcher, its fork server, two monitors and two ranks

    # nothing of ours is reached but through the run directory
    names = bound_names(sockets_of(pids))
    assert names == {str(path) for path in run_dir.glob("*.sock")}
    assert len(names) == 4

    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in run_dir.iterdir()} == {"0o600"}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
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
                return any(job.socket == f"{directory}/launcher.sock" for job in find_jobs())

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
