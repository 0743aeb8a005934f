"""The fork server: which imports it shares, which it leaves to the ranks, and servers that die or stand still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, Launched, Launcher, clean_environment, wait_until

TWO = ("--nproc-per-node", "2")


def states(launched: Launched, state: str) -> list[dict[str, Any]]:
    return [event for event in launched.events("fork_server") if event["state"] == state]


def path_with(directory: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def shared_up_to(launched: Launched) -> list[str]:
    return re.findall(r"ranks share the imports up to (\S+) \(\d+\.\d s\)$", launched.err, re.MULTILINE)


def write_modules(directory: Path, **texts: str) -> None:
    """Write modules that tell the process which has imported them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / f"{name}.py").write_text(f"import os\nPID = os.getpid()\n{text}\n")


ACTING = """
import os, sys
import first
import keeps_file
import reads_rank
import starts_thread
import uses_cuda
import raises_at_times
from late import PID
shared = [name for name in sys.argv[1:] if sys.modules[name].PID != os.getpid()]
sys.stdout.write(" ".join([RANK, CYCLE, *shared]) + "\\n")  # as a whole beside that of the other rank
""".replace("RANK, CYCLE", "os.environ['RANK'], os.environ['FT_CYCLE']")


WAITS = """
import time
while os.environ["FT_CYCLE"] < "2" and not os.path.exists("go." + os.environ["FT_CYCLE"]):
    time.sleep(0.01)
sys.exit(os.environ["FT_CYCLE"] < "2")
"""


def test_import_that_acts_is_left_to_the_ranks_and_all_others_are_shared(launcher: Launcher, tmp_path: Path) -> None:
    write_modules(
        tmp_path / "lib",
        first="",
        late="import first",
        keeps_file="FILE = open(__file__)",
        reads_rank="RANK = int(os.environ['RANK'])",
        starts_thread="import _thread, time\n_thread.start_new_thread(time.sleep, (9.0,))",
        uses_cuda="import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)",
        raises_at_times="",
    )
    script = tmp_path / "script.py"
    names = ["first", "keeps_file", "reads_rank", "starts_thread", "uses_cuda", "raises_at_times", "late"]
    script.write_text(f"{ACTING}{WAITS}")
    env = path_with(tmp_path / "lib")
    launched = launcher.start([str(script)], *TWO, "--max-restarts=2", env=env, script_args=names)
    for cycle in range(2):
        launched.wait_for(rf"^\d {cycle}", count=2)
        wait_until(lambda: len(states(launched, "ready")) == 1, 60)
        (launched.directory / f"go.{cycle}").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert re.findall(r"each rank does (.*)", finished.err) == [
        f"'import keeps_file' (script.py:4) itself: keeps_file keeps {tmp_path}/lib/keeps_file.py open",
        "'import reads_rank' (script.py:5) itself: reads_rank reads RANK",
        "'import starts_thread' (script.py:6) itself: starts_thread starts a thread of a C library",
        "'import uses_cuda' (script.py:7) itself: uses_cuda initialises CUDA",
    ]
    shared = "first raises_at_times late"
    assert sorted(finished.out.splitlines()) == [
        *("0 0", f"0 1 {shared}", f"0 2 {shared}", "1 0", f"1 1 {shared}", f"1 2 {shared}"),
    ]
    assert shared_up_to(launched) == ["script.py:11"]


def test_sitecustomize_of_the_user_runs_once_before_modules_to_preload_and_a_bad_one_of_these_is_left_out(
    launcher: Launcher, tmp_path: Path
) -> None:
    late = "import sys\nLATE = [name in sys.modules for name in ('late_module', 'queue')]"
    write_modules(
        tmp_path,
        sitecustomize=f"{late}\nprint('customized', __name__, 'sitecustomize' in sys.modules, flush=True)",
        late_module="",
        raises="raise RuntimeError('not today')",
        exits="raise SystemExit(3)",
        harmless=f"os.environ['SET_BY_HARMLESS'] = 'yes'\n{late}\nprint('printed')",
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import late_module, queue\nimport os, sys, sitecustomize, harmless\n"
        "print(sitecustomize.LATE, harmless.LATE, late_module.PID != os.getpid())\n"
        "print(os.environ['SET_BY_HARMLESS'], 'raises' in sys.modules)\n"
        "sys.exit(os.environ['FT_CYCLE'] == '0')\n"
    )
    options = ("--max-restarts=1", "--redirects=1", "--log-dir=logs", "--ft-preload=raises,exits,harmless")
    launched = launcher.start([str(script)], *options, env=path_with(tmp_path))
    finished = launched.wait()
    assert finished.code == 0
    assert dict(re.findall(r"WARNING: --ft-preload (\S+): (.*)", finished.err)) == {
        "raises": "RuntimeError: not today",
        "exits": "SystemExit: 3",
    }
    for cycle in range(2):
        (log,) = launched.directory.glob(f"logs/*/attempt_{cycle}/0/stdout.log")
        none = [False, False]
        assert log.read_text() == f"customized sitecustomize True\nprinted\n{none} {none} True\nyes False\n"


def test_module_that_ranks_load_later_is_shared_from_the_next_cycle_on(launcher: Launcher, tmp_path: Path) -> None:
    """The first optimizer imports torch._dynamo, which takes most of a second."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nimport torch, torch.distributed as dist\nhad = 'torch._dynamo' in sys.modules\n"
        "cycle = int(os.environ['FT_CYCLE'])\ndist.init_process_group('gloo')\n"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)\n"
        "sys.stdout.write(f'{cycle} {had}\\n')\ntime.sleep(1)\n"
        "dist.barrier()\ndist.destroy_process_group()\nsys.exit(not had)\n"
    )
    launched = launcher.start([str(script)], *TWO, "--max-restarts=9", "--ft-max-no-progress-cycles=0")
    finished = launched.wait(100)
    assert finished.code == 0, finished.err
    rows = finished.out.splitlines()
    assert rows[:2] == ["0 False"] * 2
    assert [row.split()[1] for row in rows[-2:]] == ["True"] * 2
    assert len(states(launched, "started")) == 1


DRAWS = """
import ctypes, os, ssl, sys, time, random, uuid
import numpy
import torch
SEED = open("/dev/urandom", "rb").read(4).hex()
KERNEL = open("/proc/sys/kernel/random/uuid").read()[:8]
libc, found = ctypes.CDLL(None), ctypes.create_string_buffer(9)
libc.read(libc.open(b"state", 0), found, 8)  # by C code, as libraries read checkpoints
state = int(found.value or b"0")
row = [random.random(), numpy.random.rand(), uuid.uuid4().hex, os.urandom(4).hex(), ssl.RAND_bytes(4).hex()]
row += [SEED, KERNEL, time.time_ns(), random.Random().random(), numpy.random.default_rng().random()]
cycle, rank = os.environ["FT_CYCLE"], os.environ["RANK"]
words = [cycle, state, torch.rand(1).item(), *row]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # as a whole beside that of the other rank
open(f"done.{cycle}.{rank}", "w").close()
while not all(os.path.exists(f"done.{cycle}.{each}") for each in "01"):
    time.sleep(0.01)
if rank == "0":
    open("state", "w").write(str(state + 1))
    sys.exit(cycle == "0")
time.sleep(60 * (cycle == "0"))
"""


def test_unseeded_numbers_and_states_are_those_of_each_rank_and_cycle(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DRAWS)
    launched = launcher.start([str(script)], *TWO, "--max-restarts=1")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert shared_up_to(launched) == ["script.py:5"]
    rows = [line.split() for line in finished.out.splitlines()]
    assert sorted(row[:2] for row in rows) == [["0", "0"], ["0", "0"], ["1", "1"], ["1", "1"]]
    assert len({row[2] for row in rows}) == 1  # torch's default seed, as in fresh interpreters
    for column in list(zip(*rows, strict=True))[3:]:
        assert len(set(column)) == 4


ASKS_CUDA = """
import os, sys, torch
torch.cuda._is_compiled = lambda: True
torch.cuda._raw_device_count_nvml = lambda: 2
torch._C._cuda_getDeviceCount = lambda: print("driver asked in a server", "RANK" not in os.environ) or 7
SAID = torch.cuda.is_available(), torch.cuda.device_count()
"""


def test_devices_are_counted_without_the_cuda_driver_while_imports_are_shared(
    launcher: Launcher, tmp_path: Path
) -> None:
    """As in a GPU image: libraries ask while they are imported, and a process that has asked CUDA can't be forked."""
    (tmp_path / "asks_cuda.py").write_text(ASKS_CUDA)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, asks_cuda\n"
        "print(asks_cuda.SAID, torch.cuda.is_available(), 'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ)\n"
    )
    launched = launcher.start([str(script)], env=path_with(tmp_path))
    assert launched.wait().out == "driver asked in a server False\n(True, 2) True False\n"


EDITED = """
import os, sys
from part import VALUE, SETTINGS, DATA
SAYS = 1
print("script", SAYS, "part", VALUE, "settings", SETTINGS, DATA, flush=True)
if os.environ["FT_CYCLE"] < "3":
    open("ready." + os.environ["FT_CYCLE"], "w").close()
    while not os.path.exists("go." + os.environ["FT_CYCLE"]):
        pass
    sys.exit(1)
"""
PART = """
import os
HERE = os.path.dirname(__file__)
SETTINGS, DATA = open(HERE + "/settings").read(), os.listdir(HERE + "/data")
VALUE = 1
"""


def test_own_modules_that_change_between_cycles_are_imported_anew(launcher: Launcher) -> None:
    """The script, a module, and what the module has read and listed while it was imported."""
    directory, source = launcher.directory / "0", launcher.directory / "src"
    (source / "data").mkdir(parents=True)
    script, part, settings = source / "script.py", source / "part.py", source / "settings"
    script.write_text(EDITED)
    part.write_text(PART)
    settings.write_text("1")
    launched = launcher.start([str(script)], "--max-restarts=3", env={"PYTHONPATH": str(ROOT)})

    def wait_for(cycle: int) -> None:
        wait_until(lambda: (directory / f"ready.{cycle}").exists(), 60)
        wait_until(lambda: len(states(launched, "ready")) > cycle, 60)

    wait_for(0)
    script.write_text(EDITED.replace("SAYS = 1", "SAYS = 22"))
    part.write_text(PART.replace("VALUE = 1", "VALUE = 22"))
    (directory / "go.0").touch()
    wait_for(1)
    settings.write_text("22")
    (directory / "go.1").touch()
    wait_for(2)
    (source / "data" / "new").touch()
    (directory / "go.2").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert finished.out.splitlines() == [
        *("script 1 part 1 settings 1 []", "script 22 part 22 settings 1 []"),
        *("script 22 part 22 settings 22 []", "script 22 part 22 settings 22 ['new']"),
    ]
    changed = re.findall(r"(\S+) changed: importing anew", finished.err)
    assert changed[0] in (str(script), str(part))
    assert changed[1:] == [str(settings), str(source / "data")]
    assert shared_up_to(launched) == ["script.py:5"]


RESTARTS = """
sys.stderr.write("first words\\n")
open(f"pid.{RANK}.{CYCLE}", "w").write(str(os.getpid()))
say("ready", RANK, CYCLE, "forked", "megatron_ft.run_ahead.server" in sys.modules)
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
    if how == signal.SIGKILL:
        wait_until(lambda: len(states(launched, "ready")) == 2, 60)
    (launched.directory / "go.0").touch()
    launched.wait_for("^ready", count=4)
    wait_until(lambda: len(states(launched, "ready")) == 2, 60)
    # and in the very moment of a restart: then the ranks are fresh interpreters, or wait for the next server
    os.kill(states(launched, "started")[-1]["pid"], how)
    (launched.directory / "go.1").touch()
    (launched.directory / "go.2").touch()
    finished = launched.wait()
    launched.assert_nothing_left()
    assert finished.code == 0, finished.err
    assert f"ready 1 1 forked {how == signal.SIGKILL}" in finished.out  # a stopped one is only met at the restart
    assert "ready 1 2" in finished.out
    why = "SIGKILL" if how == signal.SIGKILL else "SIGKILL: it is stopped"
    assert f"the fork server exited ({why}); ranks are not affected; starting a new one" in finished.lines
    found = [number or "words" for number, _ in re.findall(r"cycle (\d) started|(first words)", finished.err)]
    assert found == [word for cycle in "012" for word in (cycle, "words", "words")]


INTERRUPTED = """
import os, select, signal, sys
from megatron_ft.link.linux.process_setup import become_subreaper
from megatron_ft.link.messages.fork_server_messages import Forked, Orders
from megatron_ft.run_ahead.forking_spawner import ServerProcess
become_subreaper()
server = ServerProcess(Orders([sys.executable, "-u", sys.argv[1]], {**os.environ}))
while not server.is_ready:
    select.select([server.channel_fd], [], [])
    server.read()
go_read, go_write = os.pipe()
(pid,) = server.fork_ranks([({"RANK": "0"}, [go_read, 1, 2])]).pids
os.kill(pid, signal.SIGINT)
os.write(go_write, b"g")
print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
server.end(tuple)
"""


def test_an_interrupt_that_comes_before_a_rank_can_take_it_is_not_lost(tmp_path: Path) -> None:
    """Chaos seed 156: the server ignores SIGINT, and so did a rank for a moment; then it waited for the others."""
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('began')\n")
    command, env = [sys.executable, "-c", INTERRUPTED, str(script)], {**clean_environment(), "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert finished.stdout == f"ended with {-signal.SIGINT}\n"


def test_server_that_waits_hears_no_signal_and_servers_that_keep_dying_are_given_up(launcher: Launcher) -> None:
    """What is sent to it, or to all processes of a user, isn't for it; the handlers that it has are the script's."""
    launched = launcher.start(RESTARTS, *TWO, "--max-restarts=2")
    launched.wait_for("^ready", count=2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(states(launched, "started")[0]["pid"], number)
    for count in range(1, 6):
        wait_until(lambda count=count: len(states(launched, "started")) >= count, 30)
        os.kill(states(launched, "started")[-1]["pid"], signal.SIGKILL)
        wait_until(lambda count=count: len(states(launched, "ended")) >= count, 30)
    for cycle in range(3):
        (launched.directory / f"go.{cycle}").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    assert [event["exit_code"] for event in states(launched, "ended")] == [-signal.SIGKILL] * 5
    assert "the fork server died 5 times (SIGKILL): every rank starts its own Python" in finished.lines
    assert "ready 1 2" in finished.out


def test_command_that_no_fork_can_run_starts_fresh_interpreters(launcher: Launcher, tmp_path: Path) -> None:
    """By ``--run-path``, which isn't Python's own way; by another program than this Python."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ran', __name__, sys.argv[1:])\nraise KeyError('lost')")
    launched = launcher.start(["--run-path", str(script), "x"])
    finished = launched.wait()
    assert finished.lines[0] == "fork server off (the script isn't a file): every rank starts its own Python"
    assert (finished.code, finished.out) == (1, "ran __main__ ['x']\n")
    assert [event["error"] for event in launched.events("rank_exited")] == ["KeyError: 'lost'"]
    finished = launcher.run([str(script)], env={"PYTHON_EXEC": "/usr/bin/env"})
    reason = "the ranks aren't run by this Python"
    assert finished.lines[0] == f"fork server off ({reason}): every rank starts its own Python"
    assert "\nLOCAL_RANK=0\n" in finished.out


def test_file_beside_the_script_hides_a_module_also_for_the_fork_server(fresh_launcher: Launcher) -> None:
    (fresh_launcher.directory / "socket.py").write_text("print('mine')")
    script = fresh_launcher.directory / "hidden.py"
    text = "import socket, json, threading, os\nprint(socket.__file__ == __file__[:-9] + 'socket.py')\n"
    script.write_text(f"{text}os.environ['RANK']\n")
    launched = fresh_launcher.start([str(script)], env=dict.fromkeys("ABC", "é" * 60_000))
    finished = launched.wait()
    assert finished.out == "mine\nTrue\n"
    assert shared_up_to(launched) == ["hidden.py:2"]


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
    assert "fork failed" not in [each["state"] for each in launched.events("fork_server")]
