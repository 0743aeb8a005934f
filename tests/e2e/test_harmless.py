"""A rank under ``ft_launcher`` finds its process as under torchrun: nothing of ours touches what is the program's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, Launcher, clean_environment

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(ROOT / "tests" / "support" / "rank_state.py")
OPTIONS = ("--nproc-per-node=2", "--max-restarts=1")
States = dict[tuple[str, int, int], dict[str, Any]]
"""What was found, by moment, cycle and rank."""

OUR_THREADS = {"megatron_ft_collectives", "megatron_ft_crash_reporter", "ft_memory", "ft-simulated-fault"}
FATAL = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""Signals at which `faulthandler` writes the stacks."""
OF_ONE_START = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST", "TMPDIR")
OURS = re.compile("environ (FT_|MEGATRON_FT_|NVRX_)|logger megatron_ft")
# torchrun's cycles share a store by default, and now and then those of the second one find addresses of the first
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def caught(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {number + 1 for number in range(64) if bits >> number & 1}


def without_stand_ins(found: list[str]) -> list[str]:
    ours = re.compile(r"^torch\.distributed\.(\w+\.)?init_process_group$|^(sys|threading)\.excepthook$")
    return [each for each in found if not ours.search(each)]


DIFFERENCES: dict[str, Callable[[Any], Any]] = {
    "sys.excepthook": lambda hooks: hooks[1:] if "crash_reporter" in hooks[0] else hooks,
    "threading.excepthook": lambda hooks: hooks[1:] if "crash_reporter" in hooks[0] else hooks,
    "sys.meta_path": lambda finders: [each for each in finders if "megatron_ft" not in each],
    "replaced": without_stand_ins,
    "threads": lambda names: [name for name in names if name not in OUR_THREADS],
    "faulthandler": lambda _enabled: False,
    "gc frozen": lambda _frozen: False,
    "prctl PDEATHSIG": lambda number: 0 if number == signal.SIGKILL else number,
    "descriptors": lambda kinds: [
        each
        for each in kinds
        if not re.search("memfd:(megatron_ft_|ft_snapshot)", each) and each != "socket of AF_UNIX"
    ],
    "status SigCgt": lambda masks: sorted(
        number for number in caught(*masks) - FATAL if not signal.SIGRTMIN + 5 <= number < signal.SIGRTMAX
    ),
    "environ PYTHONPATH": lambda path: re.sub(r"[^:]*/run_ahead/startup:?", "", path),
    "environ MASTER_ADDR": lambda _address: "127.0.0.1",
    "environ TORCHELASTIC_USE_AGENT_STORE": lambda _shared: "True",
}
"""Facts that differ, each with what makes of ours what torchrun's ranks find. docs/compatibility.md has the reasons."""
OF_THE_RANK_ALONE = (
    "sys.excepthook",
    "threading.excepthook",
    "threads",
    "faulthandler",
    "prctl PDEATHSIG",
    "descriptors",
    "status SigCgt",
)
"""Facts that don't differ in what a rank forks or starts."""


def read(found: Path, directory: Path) -> States:
    """Return what the processes of one job have found, without paths and numbers of that job alone."""
    states: States = {}
    for path in found.iterdir():
        moment, cycle, rank, _ = path.name.split(".")
        facts = json.loads(path.read_text().replace(str(found), "FOUND").replace(str(directory), "DIRECTORY"))
        kept = {n: v for n, v in facts.items() if not OURS.match(n) and n.removeprefix("environ ") not in OF_ONE_START}
        states[moment, int(cycle), int(rank)] = kept
    for generator in ("numpy random", "torch random"):  # not seeded yet: each process has its own numbers
        own = {str(facts.pop(generator)) for (moment, *_), facts in states.items() if moment == "unseeded"}
        assert len(own) == 4, generator
    return states


def test_rank_finds_its_process_as_under_torchrun(
    fresh_launcher: Launcher, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ours are forked, with hooks, learning, memory checkpoints and a simulated fault."""
    directory = tmp_path_factory.mktemp("t")  # short: sockets of multiprocessing are in it
    found = {name: tmp_path / name for name in ("theirs", "ours")}
    for each in found.values():
        each.mkdir()
    launched = fresh_launcher.start(
        [SCRIPT, str(found["ours"])], *OPTIONS, env={**OWN_STORE, "FT_SIM_FAULT_DESC": "rank_killed;1;600"}
    )
    finished = launched.wait(100)
    with (directory / "launcher.out").open("w") as out, (directory / "launcher.err").open("w") as err:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *OPTIONS, SCRIPT, str(found["theirs"])],
            cwd=directory,
            env={**clean_environment(), **OWN_STORE, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=120,
        )
    assert len(os.listdir(found["theirs"])) == 33, (directory / "launcher.err").read_text()
    assert (finished.code, finished.out) == (0, ""), finished.err
    assert launched.events("fork_server") != []
    ours, theirs = read(found["ours"], launched.directory), read(found["theirs"], directory)
    assert ours.keys() == theirs.keys()
    different = []
    for where, facts in theirs.items():
        for name in facts.keys() | ours[where].keys():
            pair = [ours[where].get(name), facts.get(name)]
            if name in DIFFERENCES and not (where[0] in ("worker", "child") and name in OF_THE_RANK_ALONE):
                pair = [*map(DIFFERENCES[name], pair)]
            if pair[0] != pair[1]:
                different.append(f"{where} {name}: {pair[0]} instead of {pair[1]}")
    assert not different, "\n".join(sorted(different))
