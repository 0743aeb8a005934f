"""The reference's names in a rank: what is ours, what is the package's own, and how who asks for more is answered.

Each case is a process with the environment of a rank: the finder is there before the first line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.launcher.base.rank_environment import rank_environment
from megatron_ft.rank.reference.served import PACKAGES, SERVED
from megatron_ft.run_ahead.startup import STARTUP


def in_rank(script: str, *paths: Path) -> str:
    """What a script prints that a rank runs; `paths` are the user's PYTHONPATH."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if paths:
        own["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    env = rank_environment(own, reference_names=True)
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with something that looks like the package, of a version that can't be compared."""
    for folder in ("", "fault_tolerance", "checkpointing"):
        (tmp_path / "nvidia_resiliency_ext" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia_resiliency_ext" / folder / "__init__.py").write_text("__version__ = 'unknown'\nREAL = 1\n")
    (tmp_path / "nvidia_resiliency_ext" / "fault_tolerance" / "dict_utils.py").write_text("REAL = 2\n")
    return tmp_path


def test_every_name_is_where_the_table_says_and_the_client_is_ours() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {[*SERVED]}:\n"
        "    module = importlib.import_module(name)\n"
        "    for each in module.__all__:\n"
        "        getattr(module, each)\n"
        "import nvidia_resiliency_ext as n, megatron_ft; from packaging.version import Version\n"
        "from nvidia_resiliency_ext import fault_tolerance as ft\n"
        "print(issubclass(ft.RankMonitorClient, megatron_ft.RankMonitorClient))\n"
        "print(ft.data.RankInfo is megatron_ft.RankInfo)\n"
        "print(n.__version__, Version(n.__version__) >= Version('0.6.0'))\n"
    )
    assert in_rank(script) == "True\nTrue\n0.7.0+megatron.ft.0.1.0 True\n"
    assert set(SERVED) >= PACKAGES


def test_other_modules_and_names_are_the_packages_own(installed: Path) -> None:
    folder = installed / "nvidia_resiliency_ext"
    (folder / "checkpointing" / "async_ckpt.py").write_text("REAL = 3\n")
    (folder / "fault_tolerance" / "rank_monitor_state_machine.py").write_text(
        "class RankMonitorState: REAL = 4\nclass RankMonitorStateMachine: REAL = 5\n"
    )
    script = (
        "import nvidia_resiliency_ext as n, nvidia_resiliency_ext.checkpointing as c\n"
        "import nvidia_resiliency_ext.fault_tolerance as ft, nvidia_resiliency_ext.fault_tolerance.dict_utils as d\n"
        "from nvidia_resiliency_ext.checkpointing import async_ckpt\n"
        "from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager as m\n"
        "from nvidia_resiliency_ext.fault_tolerance import RankMonitorState, RankMonitorStateMachine\n"
        "from nvidia_resiliency_ext.fault_tolerance import *\n"
        "print(n.REAL, c.REAL, d.REAL, async_ckpt.REAL, RankMonitorState.REAL, RankMonitorStateMachine.REAL)\n"
        "print(hasattr(ft, 'REAL'), n.__version__)\n"
        "print(*(each.__module__.partition('.')[0] for each in (RankMonitorClient, m.LocalCheckpointManager)))\n"
    )
    assert in_rank(script, installed).splitlines() == [
        *("1 1 2 3 4 5", "False 0.7.0+megatron.ft.0.1.0", "megatron_ft megatron_ft")
    ]


FAULTS = """
import os, sys, time
from nvidia_resiliency_ext.shared_utils.inject_fault import *
told = []
def after(fault, called=None):
    pid = os.fork()
    if pid:
        if fault is Fault.SIGSTOP:
            os.waitpid(pid, os.WUNTRACED); os.kill(pid, 9)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dispatch_fault_injection(fault, 0.05, None)
    try:
        for _ in range(500):
            time.sleep(0.01)
            maybe_raise_workload_exception()
    except (InjectedException, KeyboardInterrupt) as error:
        os._exit(40 if isinstance(error, InjectedException) else 41)
    os._exit(0)
for fault in Fault:
    if "GPU" not in fault.name and fault is not Fault.LOCK_GIL:
        print(fault.value, fault.name, after(fault))
dispatch_fault_injection(Fault.LOCK_GIL, 0.05, lambda: print("locked", flush=True))
if os.fork() == 0:
    pid = os.getppid()
    time.sleep(1.5); os.kill(pid, 9); os._exit(0)
time.sleep(0.5)
print("not locked")
"""


def test_faults_of_the_injector_do_what_they_are_named_for() -> None:
    told = [line for line in in_rank(FAULTS).splitlines() if "FT: SIMULATED FAULT" not in line]
    assert told == [
        *("3 WORKLOAD_EXC 40", "4 ASYNC_EXC 40", "5 SIGNAL_EXC 40", "6 OS_ABORT -6", "8 SEGFAULT -11"),
        *("9 SIGINT 41", "10 SIGKILL -9", "11 SIGTERM -15", "12 SIGSTOP -9", "locked"),
    ]


def test_missing_module_or_name_raises_a_clear_error(installed: Path) -> None:
    script = (
        "import importlib.util as u\n"
        "print(u.find_spec('nvidia_resiliency_ext.inprocess'), bool(u.find_spec('nvidia_resiliency_ext')))\n"
        "try: import nvidia_resiliency_ext.inprocess\n"
        "except ModuleNotFoundError as error: print(error.name, error)\n"
    )
    error = in_rank(script)
    assert error.startswith("None True\nnvidia_resiliency_ext.inprocess ")
    assert "No module named 'nvidia_resiliency_ext.inprocess': megatron_ft serves only" in error
    assert "nvidia-resiliency-ext isn't installed here" in error
    assert "the one that is installed has none" in in_rank("import nvidia_resiliency_ext.inprocess", installed)
    assert "nvidia-resiliency-ext isn't installed here" in in_rank(
        "from nvidia_resiliency_ext.fault_tolerance import RankMonitorState"
    )
    script = "import nvidia_resiliency_ext.fault_tolerance.data as d; d.OkMsg"
    assert "megatron_ft serves nvidia_resiliency_ext.fault_tolerance.data here, which has no 'OkMsg'" in in_rank(script)


def test_a_users_own_sitecustomize_still_runs_and_the_path_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    script = f"import sys; print({STARTUP!r} in sys.path, sys.path[1] == {str(tmp_path)!r})"
    assert in_rank(script, tmp_path) == "mine\nFalse True\n"
