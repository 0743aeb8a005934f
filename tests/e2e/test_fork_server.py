"""Running ahead is safe or isn't done: what can't be shared, servers that die or stand still, twenty restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.core.run_ahead import Ahead
from megatron_ft.launcher.spawn.fork_server import ServerProcess
from tests.support.launching import ROOT, Launched, Launcher, clean_environment, fresh_launcher, launcher, wait_until

__all__ = ["fresh_launcher", "launcher"]

TWO = ("--nproc-per-node", "2")
MODULES = {
    "starts_thread": "import threading, time; threading.Thread(target=time.sleep, args=(0.1,)).start()",
    "reads_rank": "import os; RANK = int(os.environ['RANK'])",
    "raises": "raise RuntimeError('not today')",
    "exits": "raise SystemExit(3)",
    "harmless": "import os; os.environ['SET_BY_HARMLESS'] = 'yes'; VALUE = 17",
    "asks_cuda": "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), flush=True)",
}
LEFT_OUT = {
    "raises": "RuntimeError: not today",
    "exits": "SystemExit: 3",
    "nowhere": "ModuleNotFoundError: No module named 'nowhere'",
}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    directory = tmp_path / "modules"
    directory.mkdir()
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def states(launched: Launched, state: str) -> list[dict[str, Any]]:
    return [event for event in launched.events("fork_server") if event["state"] == state]


def path_with(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def fork_points(launched: Launched) -> list[str]:
    return re.findall(r"ranks are forked at (.*), after \d+\.\d s of imports$", launched.err, re.MULTILINE)


def test_modules_are_imported_before_the_script(launcher: Launcher, modules: Path) -> None:
    """A bad one is left out, and one that needs to know the rank is where the ranks begin."""
    launched = launcher.start(
        "say(RANK, os.environ.get('SET_BY_HARMLESS'), *(name in sys.modules for name in sys.argv[1:]))",
        *(*TWO, "--ft-preload=raises,exits,nowhere,harmless,reads_rank,asks_cuda"),
        env=path_with(modules),
        script_args=["raises", "harmless", "reads_rank"],
    )
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert dict(re.findall(r"--ft-preload: (\S+) could not be imported: (.*)", finished.err)) == LEFT_OUT
    assert sorted(finished.out.splitlines()) == [
        *("0 yes False True True", "1 yes False True True", *(["False 0"] * 2))
    ]
    assert fork_points(launched) == ["reads_rank.py:1 (reads RANK)"]
    assert not launched.events("fork_failed")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        # ranks that are forked behind such an operation hang at their next one
        ("import torch; torch.ones(2000, 2000) @ torch.ones(2000, 2000)", "the script has a thread of a C library"),
        ("import mmap; shared = mmap.mmap(-1, 4096)", "the script has shared memory (/dev/zero (deleted))"),
        ("import libraries_file", "the script has {}/note open for writing"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "the script has initialised CUDA"),
        ("import libraries_child", "the script has a child process"),
    ],
)
def test_resource_that_cannot_be_shared_is_seen_before_the_first_fork(
    launcher: Launcher, tmp_path: Path, before: str, reason: str
) -> None:
    site = tmp_path / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "libraries_file.py").write_text("import os\nFILE = open(os.path.dirname(__file__) + '/note', 'w')")
    (site / "libraries_child.py").write_text("import subprocess\nCHILD = subprocess.Popen(['sleep', '1000'])")
    (site / "__init__.py").touch()
    # print writes the end of the line by itself, and another rank may write in between
    text = f"import os, sys; sys.path.insert(0, {str(site)!r})\n"
    # only where it runs ahead: to import torch in each rank, too, would show nothing
    text += f"if 'megatron_ft.rank.run_ahead.script' in sys.modules: {before}\n"
    text += "RANK = os.environ['RANK']\nprint(RANK + '\\n', end='', flush=True)\n"
    script = tmp_path / "script.py"
    script.write_text(text)
    env = {"OMP_NUM_THREADS": "2"} if "ones" in before else {}
    launched = launcher.start([str(script)], *TWO, env=env)
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert sorted(finished.out.split()) == ["0", "1"]
    line = f"ranks start as fresh interpreters: {reason.format(site)} at script.py:3, where it reads RANK"
    assert finished.lines[0] == line


def test_script_that_runs_ahead_too_long_starts_as_a_fresh_interpreter(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end:\n    pass\nprint('ends')")
    patch = "import megatron_ft.launcher.spawn.forking as forking\n    forking.FORK_POINT_S = 1.0\n"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif 'megatron_ft.launcher' in sys.orig_argv:\n    {patch}")
    launched = launcher.start([str(script)], "--ft-reference-names=off", env=path_with(tmp_path))
    finished = launched.wait()
    assert (finished.code, finished.out) == (0, "ends\n")
    (fresh,) = launched.events("fresh_interpreters")
    assert "no fork point reached in 1 s" in fresh["reason"]
    assert "no fork point reached in 1 s" in finished.lines[0]


def test_script_that_kills_the_fork_server_does_not_delay_its_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """In C, where nobody sees it come. The ranks of each cycle do it, too, and don't wait for a better server."""
    script = tmp_path / "script.py"
    script.write_text("print('here', flush=True)\nimport ctypes\nctypes.string_at(0)")
    launched = launcher.start([str(script)], "--max-restarts=1")
    finished = launched.wait()
    assert finished.code == 1
    assert finished.out == "here\n" * 2
    assert "the fork server exited (SIGSEGV); ranks are not affected; starting a new one" in finished.lines


EDITED = """
import os, sys
from part import VALUE
print("script", SAYS, "part", VALUE, "settings", open(os.path.dirname(__file__) + "/settings").read(), flush=True)
found = os.path.exists("checkpoint"), os.listdir(os.path.dirname(__file__) + "/data")
print(os.environ["FT_CYCLE"], *found, flush=True)
if os.environ["FT_CYCLE"] < "3":
    open("ready." + os.environ["FT_CYCLE"], "w").close()
    while not os.path.exists("go." + os.environ["FT_CYCLE"]):
        pass
    sys.exit(1)
"""


def test_own_files_that_change_between_cycles_are_run_anew(launcher: Launcher) -> None:
    """The script, what it imports, what it reads, and what it has looked for."""
    directory = launcher.directory / "0"
    (launcher.directory / "src" / "checkout").mkdir(parents=True)
    data = launcher.directory / "src" / "data"
    data.mkdir()  # before the launch: what a script has looked for in vain changes when it comes
    script, part = launcher.directory / "src" / "script.py", launcher.directory / "src" / "checkout" / "part.py"
    settings = script.parent / "settings"
    script.write_text(EDITED.replace("SAYS", "1"))
    part.write_text("VALUE = 1")
    settings.write_text("1")
    env = {"PYTHONPATH": f"{part.parent}{os.pathsep}{ROOT}"}
    launched = launcher.start([str(script)], "--max-restarts=3", env=env)

    def go_on(cycle: int) -> None:
        wait_until(lambda: (directory / f"ready.{cycle}").exists(), 60)

    go_on(0)
    script.write_text(EDITED.replace("SAYS", "2"))
    part.write_text("VALUE = 22")
    settings.write_text("2")
    (directory / "go.0").touch()
    go_on(1)
    (directory / "checkpoint").touch()
    (directory / "go.1").touch()
    go_on(2)
    (data / "new").touch()
    (directory / "go.2").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert finished.out.splitlines() == [
        *("script 1 part 1 settings 1", "0 False []"),
        *("script 2 part 22 settings 2", "1 False []"),
        *("script 2 part 22 settings 2", "2 True []"),
        *("script 2 part 22 settings 2", "3 True ['new']"),
    ]
    changed = re.findall(r"(\S+) changed: running the script ahead again", finished.err)
    assert changed == [str(script), str(directory / "checkpoint"), str(data)]
    assert fork_points(launched) == ["script.py:6 (reads FT_CYCLE)"]


LIKE_A_CUDA_BUILD = """
import importlib.util, os, sys

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(what + "\\n")

def count():
    note("driver asked")
    return 7

def nvml():
    note("NVML asked, in a process of its own: %s" % (os.readlink("/proc/self") != FIRST))
    nvml.device = os.open("/dev/zero", os.O_WRONLY)
    return int(os.environ["DEVICES"])

def initialise():
    note("initialised")
    raise RuntimeError("there is no such device")

FIRST = os.readlink("/proc/self")

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module._is_compiled = lambda: True
            module._raw_device_count_nvml = nvml
            module._cudart = object()
            module._C = sys.modules["torch._C"]
            sys.modules["torch._C"]._cuda_getDeviceCount = count
            sys.modules["torch._C"]._cuda_init = initialise
        spec.loader.exec_module = exec_module
        return spec

if "megatron_ft.rank.run_ahead.script" in sys.modules:  # not in the launcher, which asks for itself
    sys.meta_path.insert(0, Finder())
"""
ASKS_CUDA = """
import os, sys
import torch
print(torch.cuda.is_available(), torch.cuda.device_count(), flush=True)
import torch.utils.cpp_extension
if sys.argv[1] == "initialise":
    try:
        torch.cuda._lazy_init()
    except RuntimeError:
        pass
print(os.environ["RANK"], torch.cuda._nvml_based_avail(), "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ, flush=True)
print(torch.cuda.is_available(), torch._C._cuda_getDeviceCount.__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("devices", "word", "before", "point"),
    [
        ("2", "initialise", "True 2", "script.py:8 (initialises CUDA)"),
        ("-1", "", "False 0", "script.py:11 (reads RANK)"),  # no driver: nothing to ask
    ],
)
def test_cuda_is_asked_without_being_initialised(
    launcher: Launcher, tmp_path: Path, devices: str, word: str, before: str, point: str
) -> None:
    """As in a GPU image, where torch is built with CUDA, and looks for it at the sight of a CUDA home."""
    (tmp_path / "sitecustomize.py").write_text(LIKE_A_CUDA_BUILD)
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home" / "bin" / "nvcc").touch()
    (tmp_path / "script.py").write_text(ASKS_CUDA)
    notes = tmp_path / "notes"
    env = {"CUDA_HOME": str(tmp_path / "home"), "NOTES": str(notes), "DEVICES": devices, **path_with(tmp_path)}
    launched = launcher.start([str(tmp_path / "script.py")], env=env, script_args=[word])
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert fork_points(launched) == [point]
    # the rank asks the driver itself, and that nobody has asked it before
    assert finished.out.splitlines() == [before, "0 False False", "True count"]
    told = notes.read_text().splitlines()
    asked = [line for line in told if line.startswith("NVML")]
    assert set(asked) == {"NVML asked, in a process of its own: True"}
    assert [line for line in told if line not in asked] == [*(["initialised"] if word else []), "driver asked"]


RESTARTS = """
open(f"pid.{RANK}.{CYCLE}", "w").write(str(os.getpid()))
say("ready", RANK, CYCLE, "forked", "megatron_ft.rank.run_ahead.script" in sys.modules)
while not os.path.exists(f"go.{CYCLE}"):
    time.sleep(0.005)
if CYCLE < 2 and RANK == 1:
    os._exit(7)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_ended_or_stopped_is_replaced(launcher: Launcher, how: int) -> None:
    launched = launcher.start(RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    os.kill(states(launched, "started")[0]["pid"], how)
    wait_until(lambda: len(states(launched, "ready")) == 2, 60)
    (launched.directory / "go.0").touch()
    launched.wait_for("^ready", count=4)
    # and in the very moment of a restart: then the ranks are fresh interpreters, or wait for the next server
    os.kill(states(launched, "started")[-1]["pid"], how)
    (launched.directory / "go.1").touch()
    (launched.directory / "go.2").touch()
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert "ready 1 1 forked True" in finished.out
    assert "ready 1 2" in finished.out
    assert "the fork server exited (SIGKILL); ranks are not affected; starting a new one" in finished.lines


def test_a_server_that_waits_hears_no_signal(launcher: Launcher) -> None:
    """What is sent to it, or to all processes of a user, isn't for it; the handlers that it has are the script's."""
    launched = launcher.start("import signal\n" + RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(states(launched, "started")[0]["pid"], number)
    for cycle in range(3):
        (launched.directory / f"go.{cycle}").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert len(states(launched, "started")) == 1


def test_an_interrupt_that_comes_before_a_rank_can_take_it_is_not_lost(tmp_path: Path) -> None:
    """Chaos seed 156: the server ignores SIGINT, and so did a rank for a moment; then it waited for the others."""
    script = tmp_path / "script.py"
    script.write_text("import megatron_ft, time\nprint(megatron_ft.__file__)\ntime.sleep(5)\nprint('went on')\n")
    command = [sys.executable, "-m", "tests.support.early_interrupt", str(script)]
    finished = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True)
    assert finished.stdout == f"{ROOT}/megatron_ft/__init__.py\nended with {-signal.SIGINT}\n"
    assert finished.stderr.endswith("KeyboardInterrupt\n")


def test_a_server_says_that_it_was_asked_for_something_else(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(5)\n")
    command = [sys.executable, "-u", str(script)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    server = ServerProcess(Ahead(command, environment, (), shares_output=False))
    try:
        wait_until(lambda: bool(server.read()) and server.is_ready, 30)
        server.channel.send({"type": "spawn"})
        wait_until(lambda: bool(server.read()) and server.unfit is not None, 30)
        assert server.unfit == "ProtocolError: spawn has no env"
    finally:
        server.end(set)


def test_servers_that_keep_dying_are_given_up(launcher: Launcher) -> None:
    launched = launcher.start(RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    for count in range(1, 6):
        wait_until(lambda count=count: len(states(launched, "started")) >= count, 30)
        os.kill(states(launched, "started")[-1]["pid"], signal.SIGKILL)
        wait_until(lambda count=count: len(states(launched, "ended")) >= count, 30)
    for cycle in range(3):
        (launched.directory / f"go.{cycle}").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert "the fork server died 5 times; ranks start as fresh interpreters" in finished.lines
    assert "ready 1 2" in finished.out


@pytest.mark.parametrize(
    ("options", "env", "reason"),
    [
        (["--no-python"], {}, "the ranks aren't run by this Python"),
        ([], {"PYTHON_EXEC": "/usr/bin/env"}, "the ranks aren't run by this Python"),
        (["--run-path"], {}, "the script isn't a file"),
    ],
)
def test_command_that_no_fork_can_run_starts_fresh_interpreters(
    launcher: Launcher, tmp_path: Path, options: list[str], env: dict[str, str], reason: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    words = ["echo", "ran"] if options == ["--no-python"] else [str(script)]
    launched = launcher.start(words, *options, env=env)
    finished = launched.wait()
    assert finished.lines[0] == f"ranks start as fresh interpreters: {reason}"
    if "PYTHON_EXEC" not in env:  # which doesn't know -u
        assert (finished.code, finished.out) == (0, "ran\n")
    assert not [stat for stat in launched.alive() if stat.comm == "ft_fork_server"]


def test_file_beside_the_script_hides_a_module_also_when_it_runs_ahead(fresh_launcher: Launcher) -> None:
    (fresh_launcher.directory / "socket.py").write_text("print('mine')")
    script = fresh_launcher.directory / "hidden.py"
    text = "import socket, json, threading, os\nprint(socket.__file__ == __file__[:-9] + 'socket.py')\n"
    script.write_text(f"{text}os.environ['RANK']\n")
    launched = fresh_launcher.start([str(script)], env=dict.fromkeys("ABC", "é" * 60_000))
    finished = launched.wait()
    assert finished.out == "mine\nTrue\n"
    assert fork_points(launched) == ["hidden.py:3 (reads RANK)"]


def test_twenty_restarts_leave_nothing(launcher: Launcher) -> None:
    """No restart is lost, and neither processes, descriptors, ports, memory nor files pile up."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if RANK == 0:
    launcher = os.getppid()
    fds = os.listdir(f"/proc/{launcher}/fd")
    def target(fd):
        try:
            return os.readlink(f"/proc/{launcher}/fd/{fd}")
        except OSError:
            return ""  # it has closed it since: what its monitors had sent for the ranks of the cycle before
    inodes = set(map(target, fds))
    tables = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{launcher}/net/{name}")]
    ports = sum(words[3] == "0A" and f"socket:[{words[9]}]" in inodes for words in tables)
    children = len(open(f"/proc/{launcher}/task/{launcher}/children").read().split())
    rss = int(open(f"/proc/{launcher}/statm").read().split()[1]) * 4
    say(CYCLE, len(fds), ports, children, rss)
dist.barrier()
if CYCLE < 20:
    if RANK == 1:
        os._exit(1)
    dist.barrier()
dist.destroy_process_group()
"""
    launched = launcher.start(script, *TWO, "--standalone", "--max-restarts=20")
    finished = launched.wait(100)
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    rows = [tuple(map(int, line.split())) for line in finished.out.splitlines()]
    cycles, fds, ports, children, rss = zip(*rows, strict=True)
    assert list(cycles) == list(range(21))
    # a few come and go, like those of a server that is being made
    assert max(fds[len(fds) // 2 :]) <= max(fds[: len(fds) // 2]) + 5
    assert max(ports) == 1  # of the store of this cycle's ranks
    assert max(children) <= 6
    pids = {rank["pid"] for event in launched.events("cycle_started") for rank in event["ranks"]}
    assert len(pids) == 42
    assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] == []
    assert rss[-1] - rss[len(rss) // 5] < 10_000, "KiB"
    assert states(launched, "started")[0] == states(launched, "started")[-1]
    assert not launched.events("fork_failed")
