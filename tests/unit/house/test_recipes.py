"""Recipes of CONTRIBUTING.md, tried as patches of a copy of the package: nothing else has to be touched."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent
Patch = Callable[[Mapping[str, Mapping[str, str]]], Callable[[str], Any]]
"""Takes the texts to replace in each file; None for what a new file holds. Returns what imports a patched module."""

OPTION = {
    "config/launcher_options.py": {
        "    observe_only: bool =": """
    drain_timeout: float = option(7.0, DURATION, "Time to drain.", names=("ft-drain-timeout",))
    observe_only: bool =""",
    },
}
SCHEDULER = {
    "config/launcher_options.py": {'("slurm", "kubernetes")': '("slurm", "kubernetes", "pbs")'},
    "launcher/schedulers/pbs.py": {
        "": """
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment

def detect(environ, *, full_name, is_asked):
    return SchedulerEnvironment(scheduler="pbs", job=environ["PBS_JOBID"]) if "PBS_JOBID" in environ else None

def rank_variable(environ, min_nodes, max_nodes):
    return "PBS_NODENUM"

def requeue(*_of_the_job):
    pass
"""
    },
}
REASON = {
    "diagnosis/exceptions.py": {
        '    unread: bool = False\n    """The error': '    quota: str = ""\n    unread: bool = False\n    """The error',
    },
    "launcher/processes/crash_evidence.py": {
        "    return words._replace(": "    return words._replace(quota=stderr.partition('quota ')[2],",
    },
    "link/facts/launcher.py": {
        "    after_run: bool = False\n\n": """    after_run: bool = False
    quota: str = ""

""",
    },
    "launcher/rules/node_cycle.py": {"unread=words.unread and": "quota=words.quota, unread=words.unread and"},
    "diagnosis/exits.py": {
        '    name = signal_name(-code) if code < 0 else ""': """
    if rank_exit.quota:
        return f"{who} is over its quota of {rank_exit.quota}"
    name = signal_name(-code) if code < 0 else \"\"""",
    },
}


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patch]:
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE.name}

    def copy(patches: Mapping[str, Mapping[str, str]]) -> Callable[[str], ModuleType]:
        shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        for file, changes in patches.items():
            path = tmp_path / PACKAGE.name / file
            for before, after in changes.items():
                text = path.read_text() if before else ""
                assert not before or text.count(before) == 1, f"{file}: {before}"
                path.write_text(text.replace(before, after) if before else after)
        for name in ours:
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        return lambda name: importlib.import_module(f"{PACKAGE.name}.{name}")

    yield copy
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]:
        del sys.modules[name]
    sys.modules.update(ours)


def test_option_of_the_launcher_is_in_the_help_and_reaches_its_machine(patch: Patch) -> None:
    load = patch(OPTION)
    arguments, parser = load("launcher.arguments"), argparse.ArgumentParser()
    load("config.files.options").add_ft_options(parser)
    assert "--ft-drain-timeout" in parser.format_help()
    line = arguments.parse(["--standalone", "--ft-drain-timeout", "9", __file__])
    agent = load("launcher.cycle.fault_tolerant_agent")
    assert agent.machine_options(line, checks_health=False).given.drain_timeout == 9.0


def test_reason_for_the_end_of_a_rank_is_in_the_words_on_it(patch: Patch) -> None:
    load = patch(REASON)
    words = load("launcher.processes.crash_evidence").read_last_words("", "", "quota 5 GB")
    turns, seen = load("launcher.rules.turn"), load("launcher.rules.events").Readings({0: None}, {0: words}, {}, {})
    turn = turns.Turn(now_ns=0, seen=seen, printer=turns.JobLinePrinter(turns.Options(given=None)))
    cycle = load("launcher.rules.node_cycle").NodeCycle(None, [], now_ns=0)
    cycle.exited(load("link.facts.launcher").RankExited(rank=3, cycle=0, exitcode=1), turn)
    assert cycle.failures() == ["rank 3 is over its quota of 5 GB"]


def test_scheduler_is_found_and_tells_the_rank_of_a_launcher(patch: Patch) -> None:
    schedulers = patch(SCHEDULER)("launcher.schedulers.schedulers")
    environ = {"PBS_JOBID": "17", "PBS_NODENUM": "3"}
    assert schedulers.detect(environ, "pbs").job == "17"
    assert schedulers.detect(environ).scheduler == "pbs"
    assert schedulers.rank(environ, min_nodes=1, max_nodes=4) == 3
