"""Planted bugs in the control plane, and how many simulated jobs it takes until a property is broken by each.

    python tests/simulation/mutants.py                 # all of them, up to 2,000 seeds each
    python tests/simulation/mutants.py lease owner     # those whose file or text contains one of these

A mutant is one textual change to a file of the package. Run by hand after a change of the control plane or of the
simulator: a mutant that neither a seed nor a unit test of the control plane finds is a rule that nothing checks. The
exit code is 1 if one wasn't found. `make mutate` plants many more, in what is pure, and tries unit tests first.

Equivalent, and therefore not here: `heard = here` in `JobCycle.excused_s`, since `settle` drops silent connections.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
from tests.simulation.plan import plan_of
from tests.simulation.simulate import simulate

_UNIT_TESTS = [str(ROOT / "tests/unit/job" / each) for each in ("rules", "test_etcd_leader.py")]
"""Those that wait for no real time."""


class Mutant(NamedTuple):
    """One change: in ``file``, ``old`` becomes ``new``."""

    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"


_BY_FILE: dict[str, list[tuple[str, str]]] = {
    "job/rules/liveness.py": [
        ("3 * beat_s(nodes) + 2.5", "0.2"),
        ("if all(going) else", "if going else"),
        ("if going else max(lost_s(nodes), untold_s)", ""),
        ("FINISHED_S = 300.0", "FINISHED_S = 6.0"),
        ("max(5.0, 1.5 * longest_gap_s)", "0.1 * longest_gap_s"),
        ("min(passed_s, _LONGEST_GAP_S)", "passed_s"),
    ],
    "job/rules/coordinator.py": [
        ("if number and number == self._plans:", "if number:"),
        ("all(node.is_ready for node in members) and ", ""),
        (" and self._waiting <= self._links.keys()", ""),
        ("node.decided, node.place = held, place", "node.decided = held"),
        ("number=last.number + 1, id", "number=last.number, id"),
        ("self._out.append(self._record)", "pass"),
        ("members[0].standing.store", "members[-1].standing.store"),
        (" and held.decision.id == cycle.decision.id:", ":"),
        ("self._tell([node for node in self._links.values() if node not in takes_part])", "pass"),
        ("FOUNDING_S = 8.0", "FOUNDING_S = 0.0"),
        ("self._nodes[instance] = self._links[link] = node", "self._links[link] = node"),
        ("self._clock.slept_s = now_s", "pass"),
        ("node.is_gone = self.lock_answers", "node.is_gone = True"),
        ("if not self.lock_answers:", "if False:"),
        ("FORMER_S = 15.0", "FORMER_S = 0.0"),
        ("_LINGER_S = 5.0", "_LINGER_S = 0.0"),
        ("now_s >= FORMER_S and len(fresh) >= rules.min_nodes:", "False:"),
        ("seat.node.is_gone &= cycle is not None and place in cycle.gone", "pass"),
        ("if self._is_over and node.silent:", "if False:"),
        ("node.is_gone = has_left and self._is_over", "pass"),
        ("(self._is_over or self._clock.now_s > self._clock.slept_s + GRACE_S)", "True"),
        ("if not silent:\n                node.heard_s", "if False:\n                node.heard_s"),
        ("max(NEW_LEADER_S, within_s)", "NEW_LEADER_S"),
        ("else node.gone_s + GRACE_S", "else node.gone_s"),
        ("if node.standing.shutdown:", "if False:"),
        ("for node in nodes) if rules.at_once else 0", "for node in nodes)"),
        ("if now_s - node.heard_s >= limit_s:", "if False:"),
        ("if now_s < until_s:", "if True:"),
        ("joining=max(0, min(ready, room))", "joining=ready"),
        ("cycle.outcome is not None:\n            self._end_for([node]", "False:\n            self._end_for([node]"),
        ("if cycle.verdict is not None and node.standing.verdict", "if False and node.standing.verdict"),
        ("if node.silent and within_s == FINISHED_S:", "if False:"),
        ("self._gone(node, silent=True, drops=True)", "self._gone(node, drops=True)"),
        ("has_left = not (silent or reset) and", "has_left = not silent and"),
        ("elif may_adopt and held is not None and", "elif False and"),
        (" and self._record.decision.number < held.decision.number:", ":"),
        ("self._next_cycle.took_over(nodes, now_s)", "pass"),
        (
            "self._is_over, self._ended_s, self._stays_s = True, now_s, NEW_LEADER_S",
            "self._is_over, self._ended_s, self._stays_s = True, now_s, 0.0",
        ),
        ("if self._is_of_next(node.hello):", "if False:"),
        ("if self._former is not None and knows(hello, self._former):", "if False:"),
        ("if self._plan is None or self._waiting:", "if self._plan is None:"),
        ("replace(self._record, decision=decision, revision=0)", "DecisionRecord(decision)"),
        ("if node.is_excluded and cycle is not None and seated is not None:", "if False:"),
        ("ends_job = node.hello.owns and not goodbye.excluded", "ends_job = False"),
        ("self._stays_s if is_owed else _LINGER_S", "_LINGER_S"),
        ("awaits = any(node.link is None and", "awaits = any(False and"),
        ("may_be_lost |= node.silent and cycle.outcome is None and within_s != FINISHED_S", "pass"),
        ("may_be_lost |= node.silent and cycle.outcome is None and within_s != FINISHED_S", "may_be_lost = True"),
        ("node.decided.decision.id != decision.id:", "node.decided.decision.number < decision.number:"),
        (
            "                node.begin(decision.cycle)\n            self._tell",
            "                pass\n            self._tell",
        ),
    ],
    "job/rules/job_cycle.py": [
        (
            'may be silent before it counts as lost."""',
            'may be silent before it counts as lost."""\n        return 60.0',
        ),
        ("if not heard and self.count(NodeState.SUCCEEDED):", "if not heard:"),
        ("Outcome.SUCCEEDED, now_s", "Outcome.FAILED, now_s"),
        ("if standing.report is not None:", "if False:"),
        ("if standing.ended is not None and self.outcome is None:", "if False:"),
        ("self.verdict = self.verdict or standing.verdict", "pass"),
        ("return place is not None and self.seats[place].state is not NodeState.LOST", "return place is not None"),
        ("if report.cycle != self.decision.cycle:", "if False:"),
        ("if goodbye.code == 0 and not goodbye.excluded and", "if False and"),
        ("elif self.leaving and set(self.healthy) <= self.leaving.keys():", "elif False:"),
        ("if self.outcome is not None:\n            return lost_s", "if False:\n            return lost_s"),
        ("for seat in heard or unfinished]", "for seat in heard]"),
        ("self.shutdown = self.shutdown or (place, text)", "self.shutdown = (place, text)"),
        ("report = replace(before, state=NodeState.EXCLUDED)", "pass"),
        ("self.judged is None and awaits:", "False:"),
        ("if not heard and self.count(NodeState.SUCCEEDED):", "if False:"),
        ("self._longest_gap_s is not None and not self.rules.min_healthy:", "self._longest_gap_s is not None:"),
        ("age_s is not None and age_s < limit_s for", "age_s is None or age_s < limit_s for"),
        ("if self.leaving and now_s >= self._farewell_s:", "if False:"),
        ("(goodbye, ends_job), now_s", "(goodbye, False), now_s"),
    ],
    "diagnosis/leader_parts.py": [
        ("if self._is_open(diagnosis, now_s):", "if False:"),
        ("if (hang.passive and is_asked) or", "if True or"),
        ("if is_of_lost_peer and cycle.judged is not None and cycle.own_failures:", "if False:"),
        ("if is_of_lost_peer and found is None:", "if is_of_lost_peer:"),
        ("unheard=set(range(len(cycle.seats)))", "unheard={place}"),
    ],
    "job/rules/next_cycle.py": [
        ("chosen = rotated(chosen, within=rules.segment)", "pass"),
        ("ready, rules.max_nodes, rules.segment, bad", "ready, rules.max_nodes + 1, rules.segment, bad"),
        ("cycle.decision, cycle.verdict, cycle.advance", "cycle.decision, cycle.verdict, cycle.decision.advance"),
        ("        if awaits:\n            return Round(ready, enough, awaits, math.inf)\n", ""),
        ("0.0 if is_as_large else _LAST_CALL_S", "math.inf"),
        ("        if is_over:\n", "        if False:\n"),
        ("node.hello.bad or node.name in names}", "False}"),
        ("if cycle.verdict is None or now.awaits:", "if cycle.verdict is None:"),
        ("if cycle.shutdown and cycle.outcome is not Outcome.SUCCEEDED:", "if cycle.shutdown:"),
        ("self._took_over_s, self._slots = now_s, slots", "self._took_over_s = now_s"),
        ("for node in fit if node.is_gone and node.silent]", "for node in ()]"),
    ],
    "job/rules/restart_policy.py": [
        ("if used > self.max_restarts:", "if used > self.max_restarts + 1:"),
        ("if used > self.max_restarts:", "if used >= self.max_restarts:"),
        ("0 < self.max_stalled <= advance.stalled", "0 < self.max_stalled < advance.stalled"),
        ("nodes_left is not None and nodes_left < self.min_nodes", "False"),
        ("has_failed = healthy + succeeded < self.min_nodes", "has_failed = healthy + succeeded < self.min_nodes - 1"),
        ("has_failed = healthy + succeeded < self.min_nodes", "has_failed = healthy + succeeded <= self.min_nodes"),
        (" or nodes.get(NodeState.LOST))", ")"),
        ("return Outcome.MEMBERSHIP\n        return None if ", "return Outcome.FAILED\n        return None if "),
        ("return None if healthy else", "return None if healthy > 1 else"),
        ("<= advance.stalled and not restored:", "<= advance.stalled:"),
    ],
    "job/rules/member.py": [
        ("self._out.append(m.Stay())", "self._out += [m.Stay(), m.Dismiss(0)]"),
        ("m.Dismiss(decision.code, d", "m.Dismiss(decision.code + int(self.identity.instance[1:]) % 2, d"),
        ("self._ended(m.End(self", "str(m.End(self"),
        ("if now >= until_s and", "if False and"),
        ("and not self._is_training:\n            self._g", "and True:\n            self._g"),
        ("if end.cycle != self.standing.cycle:", "if False:"),
        ("self.standing = replace(self.standing, verdict=message)", "pass"),
        ("case Link.LED if now < self._heard_s + lost_s(self._nodes):", "case Link.LED:"),
        ("case _:\n                    self._reconnect", "case Link.NONE:\n                    self._reconnect"),
        ("case m.Admitted(epoch) if epoch < self._epoch:", "case m.Admitted(epoch) if False:"),
        ("if epoch > self._epoch:", "if False:"),
        ("if last is not None and last.decision.id == decision.id:", "if False:"),
        ("not None and now >= self._leave_s:", "not None and False:"),
        ("*([] if self._leaving is None else [self._leaving])", ""),
        ("self.standing = replace(self.standing, shutdown=text)", "pass"),
        ("elif self.standing.phase is m.NodePhase.EXCLUDED:", "elif False:"),
        ("verdict.decision.action is not Action.RESTART:", "False:"),
        ("HOLDER_STAYS_S = 60.0", "HOLDER_STAYS_S = 0.5"),
        ("self._progress, self._progress_s = 0, None\n            self._out", "pass\n            self._out"),
        ("max(self._unled_s, self._stopped_s) + rules", "self._unled_s + rules"),
        ("not self._is_new and not self.identity.is_in_etcd:", "not self._is_new:"),
        ("if self._leaving.excluded:", "if False:"),
        ("if self._link is Link.OPEN:  #", "if False:  #"),
        ("else (now < progress_s + STALLED_S,)", "else (True,)"),
        ("self._address, self._epoch = address, epoch", "self._address = address"),
        ("        if end.lost:  #", "        if False:  #"),
        ("elif self._leaving is None:  #", "else:  #"),
        ("self._unled_s = self._heard_s if", "self._unled_s = self._clock.now_s if"),
    ],
    "job/rules/etcd_keys.py": [
        ("self._kept, self._revision = found", "self._kept, _ = found"),
        (
            "return replace(decode(DecisionRecord, base64.b64decode(found",
            "return None\n        return replace(decode(DecisionRecord, base64.b64decode(found",
        ),
        ("if found is None or base64.b64decode(found", "if True or base64.b64decode(found"),
        ("<= 0:\n                return False", "<= 0:\n                pass"),
        ('_is(self._leader, "create", self._epoch), ', ""),
        (', _is(self._decision, "mod", self._revision)]', "]"),
    ],
    "job/etcd_leader.py": [
        ("if record is None or now_s < self._since_s + timeout_s:", "if record is None:"),
        ("waits = self._made is not None", "waits = False"),
        ("self.due_s = now_s + RENEW_S if self._made is None else 0.0", "pass"),
        ("if record is not None and self._is_asked:", "if record is not None:"),
        ("            if not answer():\n                return [Quit()]", "            answer()"),
    ],
    "job/rules/nodes.py": [
        (" and (is_busy or is_away)", " and is_busy"),
        ("not self.is_gone and (is_busy", "(is_busy"),
        ("NEW_LEADER_S = 12.0", "NEW_LEADER_S = 0.5"),
        ("self.phase is NodePhase.READY and self.link is not None", "self.phase is NodePhase.READY"),
        ("        self.progress_age_s = None\n", "        pass\n"),
    ],
    "job/rules/admission.py": [
        ("was_here = last.kind is DecisionKind.END and hello.since < former.revision", "was_here = False"),
        ("hello.decided.decision.founding == last.founding", "True"),
    ],
}
MUTANTS = tuple(Mutant(f"megatron_ft/{file}", *each) for file, all_ in _BY_FILE.items() for each in all_)


def misplaced() -> list[str]:
    """Return the mutants whose text isn't in its file exactly once."""
    return [str(each) for each in MUTANTS if (ROOT / each.file).read_text().count(each.old) != 1]


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Give functions of this process the code, and modules the constants, that they have with the mutant."""
    path = ROOT / mutant.file
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    fresh = types.ModuleType(module.__name__)
    exec(compile(path.read_text().replace(mutant.old, mutant.new), str(path), "exec"), vars(fresh))
    with contextlib.ExitStack() as undo:
        functions = _functions(vars(fresh))
        for name, function in _functions(vars(module)).items():
            undo.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = functions[name].__code__
        for name, value in vars(module).items():
            if isinstance(value, float) and value != getattr(fresh, name):
                for each in [m for m in sys.modules.values() if getattr(m, "__dict__", {}).get(name) is value]:
                    undo.callback(setattr, each, name, value)
                    setattr(each, name, getattr(fresh, name))
        yield


def _functions(space: Mapping[str, Any]) -> dict[str, types.FunctionType]:
    """Return the functions, methods and properties that a module defines, by name."""
    found = {}
    for name, value in space.items():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, types.FunctionType) and inner.__module__ == space.get("__name__", space.get("__module__")):
            found[name] = inner
        elif isinstance(value, type) and value.__module__ == space.get("__name__"):
            found |= {f"{name}.{of}": function for of, function in _functions(vars(value)).items()}
    return found


def first_broken(mutant: Mutant, seeds: int) -> str:
    """Return the first seed that shows the mutant, and what it breaks, or a unit test; empty if none does."""
    with planted(mutant):
        runs = ((seed, simulate(plan_of(seed)).broken) for seed in range(seeds))
        return next((f"seed {seed}: {broken[0]}" for seed, broken in runs if broken), "") or failing_unit_test()


def failing_unit_test() -> str:
    """Return a unit test of the control plane that fails in this process; empty if none does."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        pytest.main(["-qx", "--tb=no", "-pno:xdist", "-pno:cacheprovider", *_UNIT_TESTS])
    return next((line.split()[1] for line in told.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))), "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose file or text contains one of them")
    parser.add_argument("--seeds", type=int, default=2000, help="simulated jobs for each, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    if moved := misplaced():
        print("not found exactly once: " + "; ".join(moved))
        return 1
    chosen = [each for each in MUTANTS if not options.words or any(word in str(each) for word in options.words)]
    missed = 0
    with multiprocessing.Pool(options.jobs) as pool:
        for mutant, found in zip(chosen, pool.imap(partial(first_broken, seeds=options.seeds), chosen), strict=True):
            print(f"{mutant}: {found or 'NOT FOUND'}", flush=True)
            missed += not found
    print(f"{len(chosen) - missed} of {len(chosen)} mutants found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
