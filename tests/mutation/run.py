"""Bugs planted in the pure rooms, one at a time: does a unit test or the simulation find each? `make mutate`.

    python tests/mutation/run.py --mutants 350 --seed 0      # a sample
    python tests/mutation/run.py --only places               # all mutants whose name matches this
    python tests/mutation/run.py --known before.txt          # exit code 1 if one that was found there is missed

The tests are collected once; each mutant gets a fork, in which the code of one function is replaced and the unit tests
run that execute the changed line. What these miss, a short simulation tries. A line of the output is a mutant: its
name, its line, and what found it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutation.mutants import Mutant, code_of, mutants_of

ROOT = Path(__file__).parents[2]
_PURE = (
    *("config", "diagnosis", "job/rules", "launcher/rules", "learning", "link/base", "link/facts", "link/messages"),
    *("memory/rules", "monitor/rules", "records/rules"),
)
PURE = tuple(ROOT / "megatron_ft" / room for room in _PURE)
UNIT = ROOT / "tests" / "unit"
ROOMS = ("config", "launcher/rules", "link", "diagnosis", "job", "learning", "memory/rules", "monitor", "records")
"""Folders of tests/unit."""
MEMORY = 6 << 30
TRACED = 100  # calls: a loop of a test makes thousands
SLOW_S = 2.0  # tests that are left out, traced
TEST_S, MUTANT_S = 10, 120  # a mutant may loop for ever
UNFOUND = ("missed", "left out")
Lines = set[tuple[str, int]]
Functions = Mapping[tuple[str, int, str], Sequence[FunctionType]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=350, help="so many, 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose name matches this pattern")
    parser.add_argument("--runs", type=int, default=30, help="simulated jobs for a mutant that no unit test finds")
    parser.add_argument("--known", type=Path, help="the output of an earlier run: what was found there, again")
    options = parser.parse_args(argv)
    campaign = Campaign(options)
    settings.register_profile("mutation", deadline=None, database=None, derandomize=True, max_examples=20)
    rooms = [str(UNIT / room) for room in ROOMS]
    options_of_pytest = ["--hypothesis-profile=mutation", "-q", "--tb=no", f"--timeout={TEST_S}"]
    options_of_pytest += ["-pno:cacheprovider", "-pno:xdist", "-pno:warnings"]
    pytest.main([*rooms, *options_of_pytest], plugins=[campaign])
    return campaign.missed_again


class Campaign:
    """A plugin of pytest that takes the place of its loop over the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.missed_again = 1  # unless the loop begins
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember that this test failed."""
        self._failed = self._failed or report.failed

    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        """Print nothing about a test."""
        return "", "", ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Trace the tests, then try each mutant against those that execute its line."""
        items = [item for item in session.items if isinstance(item, pytest.Function)]
        self.missed_again = 0
        began_s = time.monotonic()
        tests = self._tests_of_lines(items)
        importlib.import_module("tests.simulation.simulate")  # once, not in each fork
        gc.unfreeze()  # what was imported with the tests: the collector does not list what is frozen
        functions = pure_functions()
        gc.freeze()
        say(f"{len(items)} tests execute {len(tests)} lines of them, {time.monotonic() - began_s:.0f} s")
        mutants = self._mutants(set(tests))
        known = self._known()
        counts: dict[str, int] = defaultdict(int)
        for mutant in mutants:
            chosen = [items[number] for number in tests[str(mutant.path), mutant.line]]
            chosen.sort(key=lambda item: item.nodeid != known.get(mutant.name))
            found = in_child(lambda m=mutant, c=chosen: self._try(m, c, functions))  # type: ignore[misc]
            print(f"{mutant.name}\t{mutant.path.relative_to(ROOT)}:{mutant.line}\t{found}", flush=True)
            counts[found if "::" not in found else "unit tests"] += 1
            if known and found == "missed":
                self.missed_again = 1
                say(f"{mutant.name} was found by {known[mutant.name]}")
        say(f"{len(mutants)} mutants: {dict(counts)}, {time.monotonic() - began_s:.0f} s")
        return True

    def _known(self) -> dict[str, str]:
        if self.options.known is None:
            return {}
        rows = [line.split("\t") for line in self.options.known.read_text().splitlines()]
        return {row[0]: row[2] for row in rows if len(row) == 3}

    def _mutants(self, executed: Lines) -> list[Mutant]:
        known = self._known()
        every = [mutant for room in PURE for path in sorted(room.rglob("*.py")) for mutant in mutants_of(path)]
        if known:
            return [mutant for mutant in every if known.get(mutant.name, "missed") not in UNFOUND]
        every = [m for m in every if (str(m.path), m.line) in executed and re.search(self.options.only, m.name)]
        if not self.options.mutants or len(every) <= self.options.mutants:
            return every
        return random.Random(self.options.seed).sample(every, self.options.mutants)  # the first ones are a sample, too

    def _tests_of_lines(self, items: Sequence[pytest.Function]) -> dict[tuple[str, int], list[int]]:
        """Return for each line the numbers of the tests that execute it, the fastest first."""
        text = in_child(lambda: self._traced(items), limit_s=1800)
        assert text not in ("time", "crash"), "the tests can't be traced"
        tests = defaultdict(list)
        for seconds, number, lines in sorted(json.loads(text)):
            for path, line in lines if seconds <= SLOW_S else ():
                tests[path, line].append(number)
        return tests

    def _traced(self, items: Sequence[pytest.Function]) -> str:
        executed: list[tuple[float, int, list[tuple[str, int]]]] = []
        for number, item in enumerate(items):
            item.config._env_timeout = 0  # type: ignore[attr-defined]  # pytest-timeout's: to be traced takes long
            lines: Lines = set()
            began_s = time.monotonic()
            sys.settrace(tracer(lines))
            failed = self._fails(item)
            sys.settrace(None)
            if failed:
                say(f"{item.nodeid} fails without a mutant: left out")
            executed.append((time.monotonic() - began_s, number, [] if failed else sorted(lines)))
        return json.dumps(executed)

    def _try(self, mutant: Mutant, items: Sequence[pytest.Function], functions: Functions) -> str:
        if not plant(mutant, functions):
            return "left out"
        found = next((item.nodeid for item in items if self._fails(item)), None)
        if found is not None:
            return found
        return "simulation" if simulation_finds(self.options.runs) else "missed"

    def _fails(self, item: pytest.Function) -> bool:
        self._failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self._failed


def tracer(lines: Lines) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that adds the lines of them that are executed, in the first calls of each function."""
    pure = tuple(map(str, PURE))
    calls: Counter[CodeType] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(pure):
            return None
        calls[code] += 1
        return line if calls[code] <= TRACED else None

    return call


def pure_functions() -> Functions:
    """Return all pure functions by file, line and name."""
    found = defaultdict(list)
    gc.unfreeze()  # the collection of the tests has hidden them from the collector
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(tuple(map(str, PURE))):
            code = each.__code__
            found[code.co_filename, code.co_firstlineno, code.co_name].append(each)
    return found


def plant(mutant: Mutant, functions: Functions) -> bool:
    """Replace the code of the mutant's function in this process."""
    code = code_of(mutant)
    if code is None:
        return False
    found = functions.get((code.co_filename, code.co_firstlineno, code.co_name), ())
    for function in found:
        if function.__code__.co_freevars != code.co_freevars:
            return False
        function.__code__ = code
    return bool(found)


def simulation_finds(runs: int) -> bool:
    """Return True if one of so many simulated jobs breaks a property, or an assertion."""
    from tests.simulation.plan import plan_of
    from tests.simulation.simulate import simulate

    try:
        return any(simulate(plan_of(seed)).broken for seed in range(runs))
    except Exception:  # noqa: BLE001 - a machine that raises is found
        return True


def in_child(act: Callable[[], str], limit_s: float = MUTANT_S) -> str:
    """Return what a fork of this process returns; "time" or "crash" if it returns nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            text = act()
            with os.fdopen(writer, "w") as file:
                file.write(text)
        except BaseException:  # noqa: BLE001 - the parent says so, and there is nothing else to end in order
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    signal.signal(signal.SIGALRM, _expired)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with os.fdopen(reader) as file:
            return file.read() or "crash"
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        return "time"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.waitpid(pid, 0)


def _expired(*_: object) -> None:
    raise TimeoutError


def say(text: str) -> None:
    """Print a line that is no mutant."""
    print(f"# {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
