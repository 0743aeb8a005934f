"""Planted bugs in the control plane, and how many simulated jobs it takes until a property is broken by each.

    python tests/simulation/mutants.py                 # all of them, up to 2,000 seeds each
    python tests/simulation/mutants.py term owner      # those whose names contain one of these words
    python tests/simulation/mutants.py --check         # only that each text is still there, once

A mutant is one textual change to a copy of the package. Run by hand after a change of the control plane or of the
simulator: a mutant that no seed finds is a rule that nothing checks. The exit code is 1 if one wasn't found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant", "main", "misplaced"]

_ROOT = Path(__file__).parents[2]
_SEARCH = """
import gc, sys, time
from tests.simulation.plan import plan_of
from tests.simulation.simulate import simulate
gc.set_threshold(200_000, 20, 20)
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    try:
        broken = simulate(plan_of(seed)).broken
    except Exception as error:
        broken = [f"{type(error).__name__}: {error}"]
    if broken:
        print(f"seed {seed}: {broken[0]}")
        break
"""


@dataclass(frozen=True)
class Mutant:
    """One change: in ``file``, ``old`` becomes ``new``.

    ``unit``: the file whose tests find it, where no run can show it because the order of messages on one connection
    makes the guard unnecessary, or too much would have to happen at once, or where one run in many thousands does.
    """

    name: str
    file: str
    old: str
    new: str
    unit: str = ""


_COORDINATOR = "megatron_ft/job/rules/coordinator.py"
_JOB_CYCLE = "megatron_ft/job/rules/job_cycle.py"
_NEXT_CYCLE = "megatron_ft/job/rules/next_cycle.py"
_HANGS = "megatron_ft/diagnosis/leader_parts.py"
_NODES = "megatron_ft/job/rules/nodes.py"
_VERDICT = "megatron_ft/job/rules/verdict.py"
_MEMBER = "megatron_ft/job/rules/member.py"
_POLICY = "megatron_ft/job/rules/restart_policy.py"
_CHOICE = "megatron_ft/memory/rules/choice.py"
_BAD_NODES = "megatron_ft/job/rules/bad_nodes.py"
_COMPLETE = "megatron_ft/memory/leader/complete_snapshots.py"
_AGENT = "megatron_ft/core/agent/agent.py"
_PATIENCE = "megatron_ft/job/rules/give_up_policy.py"
_LAST_LOOK = "megatron_ft/core/agent/last_look.py"
_DECIDER = "megatron_ft/job/rules/decider.py"
_LEADER_TESTS = "tests/unit/job/rules/test_leader.py"
_COORDINATOR_TESTS = "tests/unit/job/rules/test_coordinator.py"
_LOSS_TESTS = "tests/unit/job/rules/test_loss.py"
_ENDINGS = "tests/unit/job/rules/test_job_endings.py"
_MACHINES = "tests/unit/job/rules/test_job_machines.py"
_CHOICE_TESTS = "tests/unit/memory/rules/test_choice.py"
_SNAPSHOT_TESTS = "tests/unit/core/agent/test_agent_snapshots.py"

MUTANTS = (
    Mutant(
        "a silent node is lost while all others make progress",
        "megatron_ft/job/rules/liveness.py",
        "return _PROGRESSING_S if all(going) else",
        "return lost_s(nodes) if all(going) else",
        _LOSS_TESTS,
    ),
    Mutant(
        "a silent node is lost at once though some others make progress",
        "megatron_ft/job/rules/liveness.py",
        "if not any(going):",
        "if not all(going):",
        _LOSS_TESTS,
    ),
    Mutant(
        "progress counts under min-healthy",
        _JOB_CYCLE,
        "if self._longest_gap_s is None or self.rules.min_healthy or not heard:",
        "if self._longest_gap_s is None or not heard:",
        _LOSS_TESTS,
    ),
    Mutant(
        "a node that is silent at the end is lost",
        _COORDINATOR,
        "if within_s == FINISHED_S and not node.has_exited(self._clock.slept_s):",
        "if False:",
        _LOSS_TESTS,
    ),
    Mutant(
        "a proven end after all others have finished is no loss",
        _NODES,
        "if self.has_exited(slept_s):",
        "if False:",
        _LOSS_TESTS,
    ),
    Mutant(
        "progress doesn't keep the ranks of a cut-off node",
        _MEMBER,
        "return max(self._unled_s + self._lost_s, self._progress_s + STALLED_S)",
        "return self._unled_s + self._lost_s",
        _LOSS_TESTS,
    ),
    Mutant(
        "stalled ranks of a launcher whose leader restarts are ended",
        _MEMBER,
        "return max(self._unled_s + self._lost_s, self._progress_s + STALLED_S)",
        "return self._progress_s + STALLED_S",
        _LOSS_TESTS,
    ),
    Mutant(
        "a request to stop after the success of all ranks",
        _NEXT_CYCLE,
        "if cycle.shutdown and cycle.outcome is not Outcome.SUCCEEDED:",
        "if cycle.shutdown:",
        _LEADER_TESTS,
    ),
    Mutant(
        "a decision without signs of life",
        _DECIDER,
        "if plan is None or plan.waiting:",
        "if plan is None:",
        _LEADER_TESTS,
    ),
    Mutant(
        "a job founded with fewer than MAX at once",
        _COORDINATOR,
        "len(fresh) >= self._rules.max_nodes",
        "len(fresh) >= self._rules.min_nodes",
        _LEADER_TESTS,
    ),
    Mutant(
        "an excluded launcher founds a job",
        _COORDINATOR,
        "fresh = [node for node in fresh if node.phase is not m.NodePhase.EXCLUDED]",
        "pass",
        _LEADER_TESTS,
    ),
    Mutant(
        "a decision taken over after an own one",
        _DECIDER,
        "if held is None or not self._may_adopt or",
        "if held is None or",
        _LEADER_TESTS,
    ),
    Mutant(
        "the older of two decisions taken over",
        _DECIDER,
        "last.number >= held.decision.number):",
        "last.number <= held.decision.number):",
        _LEADER_TESTS,
    ),
    Mutant("a new leader that doesn't wait", _JOB_CYCLE, "NEW_LEADER_S = 12.0", "NEW_LEADER_S = 2.0", _LEADER_TESTS),
    Mutant("a record without launchers", _JOB_CYCLE, "if record.instances:", "if False:", _LEADER_TESTS),
    Mutant(
        "the job goes on without the lock's holder",
        _COORDINATOR,
        "if node.owns and not goodbye.excluded:",
        "if False:",
        _LEADER_TESTS,
    ),
    Mutant(
        "the leader leaves at the job's end",
        _COORDINATOR,
        "until_s = self._over_s if self._unacknowledged else self._lingers_s",
        "until_s = self._lingers_s",
        _LEADER_TESTS,
    ),
    Mutant(
        "the leader waits for ever after the job's end",
        _COORDINATOR,
        "until_s = self._over_s if self._unacknowledged else self._lingers_s",
        "until_s = 1e9 if self._unacknowledged else self._lingers_s",
        _LEADER_TESTS,
    ),
    Mutant(
        "the leader outlives its launcher",
        _COORDINATOR,
        "if self._is_orphan or is_needless:",
        "if is_needless:",
        _LEADER_TESTS,
    ),
    Mutant(
        "the lock's holder doesn't wait for the end",
        _MEMBER,
        "give_up_policy.HOLDER_STAYS_S if self.owns and not message.excluded else message.within_s",
        "message.within_s",
        _LEADER_TESTS,
    ),
    Mutant("a missed decision isn't told", _COORDINATOR, "if not knows:", "if False:", _LEADER_TESTS),
    Mutant(
        "ranks of another cycle aren't ended",
        _COORDINATOR,
        "if place is None:\n            self._end_without(node, cycle)\n            return",
        "if place is None:\n            return",
        _LEADER_TESTS,
    ),
    Mutant("missing nodes are never lost", _JOB_CYCLE, "if now_s < since_s + after_s:", "if True:"),
    Mutant("a shutdown request forgotten by a new leader", _COORDINATOR, "if node.standing.shutdown:", "if False:"),
    Mutant(
        "a cycle with MAX+1 nodes",
        _NEXT_CYCLE,
        "choose(self._slots, ready, rules.max_nodes, bad",
        "choose(self._slots, ready, rules.max_nodes + 1, bad",
    ),
    Mutant(
        "a cycle interrupted without scale-up at once",
        _COORDINATOR,
        "self._nodes.values() if rules.at_once else ()",
        "self._nodes.values()",
    ),
    Mutant(
        "the no-progress count forgotten",
        _NEXT_CYCLE,
        "if cycle is None else cycle.advance,\n            back",
        "if cycle is None else cycle.decision.advance,\n            back",
    ),
    Mutant(
        "one restart too many",
        _POLICY,
        "case Outcome.FAILED if used > self.max_restarts:",
        "case Outcome.FAILED if used > self.max_restarts + 1:",
    ),
    Mutant(
        "one restart too few",
        _POLICY,
        "case Outcome.FAILED if used > self.max_restarts:",
        "case Outcome.FAILED if used >= self.max_restarts:",
    ),
    Mutant(
        "one cycle without progress too many",
        _POLICY,
        "0 < self.max_stalled <= advance.stalled",
        "0 < self.max_stalled < advance.stalled",
    ),
    Mutant("too few nodes left go on", _POLICY, "nodes_left is not None and nodes_left < self.min_nodes", "False"),
    Mutant(
        "min-healthy: one node less",
        _POLICY,
        "has_failed = healthy + succeeded < self.min_nodes",
        "has_failed = healthy + succeeded < self.min_nodes - 1",
    ),
    Mutant(
        "min-healthy: one node more",
        _POLICY,
        "has_failed = healthy + succeeded < self.min_nodes",
        "has_failed = healthy + succeeded <= self.min_nodes",
    ),
    Mutant("a lost node is no failure", _POLICY, " or nodes.get(NodeState.LOST))", ")"),
    Mutant(
        "an excluded node costs a restart",
        _POLICY,
        "return Outcome.MEMBERSHIP\n        return None if healthy",
        "return Outcome.FAILED\n        return None if healthy",
    ),
    Mutant(
        "success while a rank runs",
        _POLICY,
        "return None if healthy else",
        "return None if healthy > 1 else",
    ),
    Mutant("busy nodes aren't awaited", _NEXT_CYCLE, "        if awaited:\n            return False\n", ""),
    Mutant("a last call that is never over", _NEXT_CYCLE, "return now_s >= self.alarm_s", "return False"),
    Mutant("no last call", _NEXT_CYCLE, "return now_s >= self.alarm_s", "return True"),
    Mutant("the join timeout is ignored", _NEXT_CYCLE, "now_s >= self.waits_s + rules.join_timeout_s", "False"),
    Mutant("launchers that were never met are forgotten", _NEXT_CYCLE, "left -= unmet", "pass"),
    Mutant(
        "a lost node gets its place back",
        _JOB_CYCLE,
        "seat.state is NodeState.LOST or seat.instance not in",
        "seat.instance not in",
    ),
    Mutant(
        "a report of another cycle counts",
        _JOB_CYCLE,
        "if report.cycle != self.decision.cycle:\n            return",
        "if False:\n            return",
    ),
    Mutant(
        "an outcome isn't restored", _JOB_CYCLE, "if standing.ended is not None and self.outcome is None:", "if False:"
    ),
    Mutant(
        "a request to end is forgotten after the verdict",
        _JOB_CYCLE,
        "verdict = self.verdict if self.outcome is not None and self.shutdown is None else None",
        "verdict = self.verdict if self.outcome is not None else None",
    ),
    Mutant(
        "a verdict isn't restored", _JOB_CYCLE, "if self.verdict is None and standing.verdict is not None:", "if False:"
    ),
    Mutant(
        "a farewell with success is a loss at once",
        _JOB_CYCLE,
        "if goodbye.well and not goodbye.excluded and",
        "if False and",
    ),
    Mutant(
        "a consequence is named at once",
        _JOB_CYCLE,
        "if not is_known and (self._missing or has_absent or",
        "if False and (self._missing or has_absent or",
        _MACHINES,
    ),
    Mutant(
        "an open diagnosis is ended",
        _HANGS,
        "if self._is_open(diagnosis, now_s):",
        "if False:",
    ),
    Mutant("a hang is never diagnosed", _HANGS, "if is_refused or self._diagnosis", "if True or self._diagnosis"),
    Mutant(
        "a hang under min-healthy is never reviewed",
        _HANGS,
        "is_refused = is_asked if hang.passive else",
        "is_refused = True if hang.passive else",
    ),
    Mutant(
        "a rank that only waits is ended",
        _LAST_LOOK,
        "return is_asked and bool(review.hanging) and verdict.rank not in review.hanging",
        "return False",
    ),
    Mutant("silent nodes aren't noticed", _COORDINATOR, "if self._clock.now_s - node.heard_s >= limit_s:", "if False:"),
    Mutant("a spare counts though there is no room", _COORDINATOR, "joining=max(0, min(ready, room))", "joining=ready"),
    Mutant("ranks of a cut-off node go on", _MEMBER, "                self._out.append(end)", "                pass"),
    Mutant("a launcher never gives up", _MEMBER, "if unled_s >= self._patience_s() and", "if False and"),
    Mutant(
        "the end of another cycle is taken",
        _MEMBER,
        "if end.cycle != self.standing.cycle:\n            return",
        "if False:\n            return",
    ),
    Mutant(
        "a diagnosis asks no launcher that has just gone",
        _HANGS,
        "asked = {at for at in range(len(cycle.seats)) if at not in cycle.gone}",
        "asked = {at for at in range(len(cycle.seats)) if not cycle.is_missing(at)}",
    ),
    Mutant(
        "a failure explains no lost peer",
        _HANGS,
        "if diagnosis.is_of_lost_peer and cycle.has_own_failure:",
        "if False:",
    ),
    Mutant(
        "a diagnosis of a lost peer names no rank",
        _HANGS,
        "if diagnosis.is_of_lost_peer and found is None:",
        "if diagnosis.is_of_lost_peer:",
    ),
    Mutant(
        "a node whose connection the kernel gave up is lost at once",
        _NODES,
        "return max(self.gone_s, self.heard_s + limit_s)",
        "return self.gone_s",
        _COORDINATOR_TESTS,
    ),
    Mutant(
        "a node that was only cut off is named where too few are healthy",
        _VERDICT,
        "return Cause(kind=CauseKind.MEMBERSHIP, text=text), place, True",
        "return Cause(kind=CauseKind.MEMBERSHIP, text=text), decided_by, True",
        _ENDINGS,
    ),
    Mutant(
        "an exclusion hides the failure before it",
        _JOB_CYCLE,
        "if report.state is NodeState.EXCLUDED and has_ended_it:",
        "if False:",
        _ENDINGS,
    ),
    Mutant(
        "a farewell to another coordinator isn't believed",
        _COORDINATOR,
        "if (former := self._nodes.get(hello.former_instance)) is not None:",
        "if (former := self._nodes.get(hello.former_instance)) is not None and False:",
        _COORDINATOR_TESTS,
    ),
    Mutant(
        "nodes that come and go keep a round open for ever",
        _NEXT_CYCLE,
        "self.alarm_s = min(self._settled_s + call_s, self._met_s + max(call_s, rules.join_timeout_s))",
        "self.alarm_s = self._settled_s + call_s",
        _MACHINES,
    ),
    Mutant("a verdict isn't remembered", _MEMBER, "self.standing = replace(self.standing, verdict=message)", "pass"),
    Mutant(
        "a silent coordinator isn't left",
        _MEMBER,
        "elif self._is_open and now >= self._heard_s + self._lost_s:",
        "elif False:",
    ),
    Mutant(
        "an excluded node's launcher ends with 94", _PATIENCE, "if standing.phase is m.NodePhase.EXCLUDED:", "if False:"
    ),
    Mutant(
        "a known verdict is no reason to leave", _PATIENCE, "verdict.decision.action is not Action.RESTART:", "False:"
    ),
    Mutant(
        "a snapshot that the job has left behind",
        _CHOICE,
        " if key.cycle == last.cycle or key == restored)",
        ")",
        _CHOICE_TESTS,
    ),
    Mutant("an older snapshot than the newest", _CHOICE, "reverse=True)", "reverse=False)"),
    Mutant("a snapshot that not all nodes have", _CHOICE, "        if not reason:", "        if True:"),
    Mutant("a snapshot that nobody serves", _CHOICE, "if each.port and (serves", "if (serves", _CHOICE_TESTS),
    Mutant(
        "a snapshot of other ranks",
        _CHOICE,
        "if (one.key, one.world) == (key, world) for rank in one.ranks",
        "if one.key == key for rank in one.ranks",
        _CHOICE_TESTS,
    ),
    Mutant("spares are not asked for copies", _CHOICE, "holders = [*kept, *spares]", "holders = [*kept]"),
    Mutant("a bad snapshot again and again", _CHOICE, "if before.tries + 1 >= MOST_TRIES:", "if False:"),
    Mutant("the tries of a snapshot forgotten", _CHOICE, "tries=before.tries + 1,", "tries=0,"),
    Mutant(
        "a snapshot complete on all nodes but one",
        _COMPLETE,
        "== self._nodes:\n            self._complete",
        ">= self._nodes - 1 > 0:\n            self._complete",
    ),
    Mutant(
        "restored before all nodes have",
        _COMPLETE,
        "return len(self._restored) == self._nodes",
        "return len(self._restored) == 1",
    ),
    Mutant(
        "what was complete is given up at a takeover",
        "megatron_ft/memory/leader/snapshots_part.py",
        "if status.complete is not None:",
        "if False:",
    ),
    Mutant(
        "a cycle that ends before its nodes meet had no ranks",
        _AGENT,
        " or self._kept.local_ranks",
        "",
        _SNAPSHOT_TESTS,
    ),
    Mutant("ranks are started without the snapshot", _AGENT, ", restore=decision.restore)", ")"),
    Mutant(
        "no chance for the file after snapshots without progress",
        _POLICY,
        "<= advance.stalled and not restored:",
        "<= advance.stalled:",
    ),
    Mutant(
        "a verdict on another cycle is remembered",
        _MEMBER,
        "if message.cycle == self.standing.cycle:\n                    self.standing = replace(self.standing, verdict",
        "if True:\n                    self.standing = replace(self.standing, verdict",
        _MACHINES,
    ),
    Mutant(
        "a bad node is chosen like the others",
        _BAD_NODES,
        "return frozenset(node.instance for node in nodes if node.bad or node.name in names)",
        "return frozenset()",
    ),
    Mutant("excluded nodes count as left", _NEXT_CYCLE, "return here - leaving + ", "return here + "),
)


def misplaced(root: Path = _ROOT) -> list[str]:
    """Return the names of mutants whose text isn't in its file exactly once."""
    return [each.name for each in MUTANTS if (root / each.file).read_text().count(each.old) != 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose names contain one of them")
    parser.add_argument("--seeds", type=int, default=2000, help="simulated jobs for each, at most")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true", help="only look whether the texts are still there")
    options = parser.parse_args(argv)
    if moved := misplaced():
        print("not found exactly once: " + "; ".join(moved))
        return 1
    if options.check:
        return 0
    chosen = [each for each in MUTANTS if not options.words or any(word in each.name for word in options.words)]
    with ThreadPoolExecutor(options.jobs) as pool:
        missed = [*pool.map(lambda each: _is_missed(each, options.seed, options.seeds), chosen)]
    print(f"{len(chosen) - sum(missed)} of {len(chosen)} mutants found")
    return 1 if any(missed) else 0


def _is_missed(mutant: Mutant, first: int, seeds: int) -> bool:
    with tempfile.TemporaryDirectory() as text:
        copy = Path(text)
        for folder in ("megatron_ft", "tests"):
            shutil.copytree(_ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-c", _SEARCH, str(first), str(first + seeds)]
        if mutant.unit:
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", mutant.unit]
            shutil.copy(_ROOT / "pyproject.toml", copy)
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if mutant.unit:
        print(f"{mutant.name}: {'found by' if done.returncode == 1 else 'NOT FOUND by'} {mutant.unit}", flush=True)
        return done.returncode != 1
    found = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    print(f"{mutant.name}: {found or f'NOT FOUND in {seeds} seeds'}", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main())
