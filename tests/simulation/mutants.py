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

    ``unit``: the test that finds it, where no run can show it because the order of messages on one connection makes
    the guard unnecessary, or too much would have to happen at once, or where one run in many thousands does.
    """

    name: str
    file: str
    old: str
    new: str
    unit: str = ""


_COORDINATOR = "megatron_ft/core/coordinator/coordinator.py"
_CONSENSUS = "megatron_ft/core/coordinator/consensus.py"
_JOB_CYCLE = "megatron_ft/core/coordinator/job_cycle.py"
_NEXT_CYCLE = "megatron_ft/core/coordinator/next_cycle.py"
_NODES = "megatron_ft/core/coordinator/nodes.py"
_NOTICES = "megatron_ft/core/coordinator/notices.py"
_VERDICT = "megatron_ft/core/coordinator/verdict.py"
_LOCATOR = "megatron_ft/core/job/coordinator_locator.py"
_MEMBER = "megatron_ft/core/job/member.py"
_DECISIONS = "megatron_ft/core/job/decisions.py"
_POLICY = "megatron_ft/core/job/restart_policy.py"
_CHOICE = "megatron_ft/core/memory/choice.py"
_BAD_NODES = "megatron_ft/core/coordinator/bad_nodes.py"
_COMPLETE = "megatron_ft/core/coordinator/complete_snapshots.py"
_AGENT = "megatron_ft/core/agent/agent.py"
_PATIENCE = "megatron_ft/core/job/give_up_policy.py"
_LAST_LOOK = "megatron_ft/core/agent/last_look.py"
_COORDINATOR_TESTS = "tests/unit/core/coordinator/test_coordinator.py"
_TAKING_OVER = "tests/unit/core/coordinator/test_taking_over.py"
_ENDINGS = "tests/unit/core/job/test_job_endings.py"
_MACHINES = "tests/unit/core/job/test_job_machines.py"
_OLDER = f"{_MACHINES}::test_launcher_accepts_nothing_older_than_what_it_has_accepted_or_knows_to_be_decided"

MUTANTS = (
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
        "commit with the last cycle's store",
        _CONSENSUS,
        "self._adopt(decision, proposal.store, nodes)",
        "self._adopt(decision, self.store or proposal.store, nodes)",
    ),
    Mutant(
        "the no-progress count forgotten",
        _NEXT_CYCLE,
        "if cycle is None else cycle.advance,\n            back",
        "if cycle is None else cycle.decision.advance,\n            back",
    ),
    Mutant(
        "the owner's vote elsewhere ignored",
        _MEMBER,
        "if self._owned - {self._search.address}:",
        "if False:",
        unit="tests/unit/core/coordinator/test_coordinator.py::"
        "test_launcher_kills_its_own_coordinators_before_it_votes_at_another",
    ),
    Mutant(
        "a leaver that voted elsewhere counted as gone",
        _CONSENSUS,
        "accepted.held.decision.number > decision.number:\n            return",
        "accepted.held.decision.number > decision.number:\n            pass",
    ),
    Mutant("a shutdown request forgotten at a takeover", _COORDINATOR, "if standing.shutdown:", "if False:"),
    Mutant(
        "a leaver follows after its goodbye",
        _MEMBER,
        "if self._leaving is not None:\n            return  # a launcher that has said goodbye",
        "if False:\n            return  # a launcher that has said goodbye",
    ),
    Mutant(
        "a leaver accepts once its store is open",
        _MEMBER,
        "self._is_open and self._leaving is None",
        "self._is_open",
        unit=f"{_MACHINES}::test_launcher_that_says_goodbye_while_it_opens_the_store_does_not_accept_any_more",
    ),
    Mutant(
        "a leaver votes after its goodbye",
        _MEMBER,
        "if self._leaving is not None or not self.memory",
        "if not self.memory",
        unit=f"{_MACHINES}::test_launcher_that_has_said_goodbye_neither_follows_nor_accepts",
    ),
    Mutant(
        "may_accept ignores terms",
        _DECISIONS,
        "ballot[:2] >= self.promised and ",
        "",
        unit=f"{_MACHINES}::test_a_launcher_follows_nobody_with_a_lesser_term_and_accepts_nothing_of_it",
    ),
    Mutant(
        "following ignores terms",
        _MEMBER,
        "if term < self.memory.promised:",
        "if False:",
        unit=f"{_MACHINES}::test_a_launcher_follows_nobody_with_a_lesser_term_and_accepts_nothing_of_it",
    ),
    Mutant("may_accept ignores what was accepted", _DECISIONS, " and not is_stale", "", unit=_OLDER),
    Mutant("may_accept ignores numbers", _DECISIONS, " and decision.number > self.number", "", unit=_OLDER),
    Mutant(
        "no grace for a launcher that hadn't followed",
        _NODES,
        "reset, not self.follows",
        "reset, False",
    ),
    Mutant(
        "no grace after a takeover",
        _COORDINATOR,
        "self._clock.mark_unanswered()",
        "pass",
        unit=f"{_COORDINATOR_TESTS}::test_launcher_that_gave_up_on_a_new_coordinator_is_silent_not_ended",
    ),
    Mutant("half without the head decides", _DECISIONS, "== size > 0 and decision.head in places", "== size > 0"),
    Mutant(
        "leavers of the last decision are counted",
        _DECISIONS,
        "decision.size - len(left)",
        "decision.size",
        unit=f"{_MACHINES}::test_quorum_is_a_majority_of_the_voters_that_have_not_left",
    ),
    Mutant(
        "what may be decided is never proposed again",
        _CONSENSUS,
        "return 2 * (having + self.decision.size - len(self._following)) >= self.decision.size",
        "return False",
    ),
    Mutant(
        "what can't be decided is proposed again",
        _CONSENSUS,
        "return 2 * (having + self.decision.size - len(self._following)) >= self.decision.size",
        "return True",
    ),
    Mutant(
        "a commit without the members",
        _CONSENSUS,
        "if proposal is None or proposal.waiting or",
        "if proposal is None or",
    ),
    Mutant(
        "a commit without a majority",
        _CONSENSUS,
        "proposal.waiting or not self._suffices(proposal.voters, proposal.founder)",
        "proposal.waiting",
    ),
    Mutant(
        "a lead before all that are here follow",
        _CONSENSUS,
        "enough and (before or len(self._following) == len(self._here))",
        "enough",
    ),
    Mutant(
        "an accept of a node that doesn't follow",
        _CONSENSUS,
        "ballot != ballot or not node.follows",
        "ballot != ballot",
    ),
    Mutant(
        "an accept of another ballot",
        _CONSENSUS,
        "proposal is None or proposal.ballot != ballot or",
        "proposal is None or",
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
        "if healthy + succeeded < self.min_nodes:",
        "if healthy + succeeded < self.min_nodes - 1:",
    ),
    Mutant(
        "min-healthy: one node more",
        _POLICY,
        "if healthy + succeeded < self.min_nodes:",
        "if healthy + succeeded <= self.min_nodes:",
    ),
    Mutant("a lost node is no failure", _POLICY, " or nodes.get(NodeState.LOST):", ":"),
    Mutant(
        "an excluded node costs a restart",
        _POLICY,
        "return Outcome.MEMBERSHIP\n        return None if nodes",
        "return Outcome.FAILED\n        return None if nodes",
    ),
    Mutant(
        "success while a rank runs",
        _POLICY,
        "return None if nodes.get(NodeState.HEALTHY) else",
        "return None if nodes.get(NodeState.HEALTHY, 0) > 1 else",
    ),
    Mutant("busy nodes aren't awaited", _NEXT_CYCLE, "        if awaited:\n            return False\n", ""),
    Mutant("a last call that is never over", _NEXT_CYCLE, "return now_s >= self.alarm_s", "return False"),
    Mutant("no last call", _NEXT_CYCLE, "return now_s >= self.alarm_s", "return True"),
    Mutant("the join timeout is ignored", _NEXT_CYCLE, "now_s >= self.waits_s + rules.join_timeout_s", "False"),
    Mutant(
        "lost nodes keep their vote",
        _NEXT_CYCLE,
        "if self.lost_s is None:\n            return",
        "if True:\n            return",
    ),
    Mutant(
        "a roll leaves out who is coming",
        _NEXT_CYCLE,
        " or any(_is_coming(node, cycle) for node in self._nodes.values())",
        "",
    ),
    Mutant("a roll leaves out who may yet come", _NEXT_CYCLE, "elif cycle.awaited or has_absent", "elif has_absent"),
    Mutant(
        "a roll forgets progress",
        _NEXT_CYCLE,
        "restarts=decision.restarts,\n                advance=decision.advance,",
        "restarts=decision.restarts,\n                advance=type(decision.advance)(),",
    ),
    Mutant(
        "a roll forgets the restarts",
        _NEXT_CYCLE,
        "restarts=decision.restarts,\n                advance=decision.advance,",
        "restarts=0,\n                advance=decision.advance,",
    ),
    Mutant(
        "launchers are told no candidates",
        _NODES,
        "return tuple(node.address for node in first if node.address)[:_CANDIDATES]",
        "return ()",
    ),
    Mutant(
        "a node whose launcher left its coordinator behind is awaited",
        _COORDINATOR,
        "if self._cycle is not None and self._cycle.is_seated(node):\n                self._cycle.lose(",
        "if False:\n                self._cycle.lose(",
    ),
    Mutant("launchers that were never met are forgotten", _NEXT_CYCLE, "left -= unmet", "pass"),
    Mutant(
        "launchers that may be back are given up",
        _NEXT_CYCLE,
        "if left + len(back_s) < rules.min_nodes:",
        "if left < rules.min_nodes:",
    ),
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
    Mutant("missing nodes are never lost", _JOB_CYCLE, "elif now_s >= since_s + after_s:", "elif False:"),
    Mutant(
        "an outcome isn't restored", _JOB_CYCLE, "if standing.ended is not None and self.outcome is None:", "if False:"
    ),
    Mutant(
        "a request to end is forgotten after the verdict",
        _JOB_CYCLE,
        "        self.state.move(CoordinatorMove.REQUEST)\n",
        "",
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
        unit=f"{_MACHINES}::test_excluded_node_is_the_cause_only_if_no_missing_node_may_be",
    ),
    Mutant(
        "an open diagnosis is ended",
        _JOB_CYCLE,
        "elif self.diagnosis is not None and self.diagnosis.is_open(now_s):",
        "elif False:",
    ),
    Mutant("a hang is never diagnosed", _JOB_CYCLE, "if is_refused or self.diagnosis", "if True or self.diagnosis"),
    Mutant(
        "a hang under min-healthy is never reviewed",
        _JOB_CYCLE,
        "is_refused = is_asked if hang.passive else",
        "is_refused = True if hang.passive else",
    ),
    Mutant(
        "a rank that only waits is ended",
        _LAST_LOOK,
        "return self._options.min_healthy and verdict.enforced and waits and is_running",
        "return False",
    ),
    Mutant(
        "a session that is over is believed", _COORDINATOR, "or (node is not None and hello.session < node.session)", ""
    ),
    Mutant(
        "the end isn't told to who comes later",
        _COORDINATOR,
        "if self._state.is_over:\n            self._out.append(Send([link]",
        "if False:\n            self._out.append(Send([link]",
    ),
    Mutant("missed decisions aren't sent", _COORDINATOR, "if node.memory.number < decision.number:", "if False:"),
    Mutant(
        "no end for ranks of a lost node",
        _COORDINATOR,
        "        if not seated:\n            waits",
        "        if False:\n            waits",
    ),
    Mutant("silent nodes aren't noticed", _COORDINATOR, "if self._clock.now_s - node.heard_s >= limit_s:", "if False:"),
    Mutant("a spare counts though there is no room", _COORDINATOR, "joining=max(0, min(ready, room))", "joining=ready"),
    Mutant("standby nodes aren't dismissed", _COORDINATOR, "self._dismiss_standby()\n", "pass\n"),
    Mutant("an orphan stays", _COORDINATOR, "return is_alone and (self._is_orphan or", "return is_alone and (False or"),
    Mutant("ranks of a cut-off node go on", _MEMBER, "                self._out.append(end)", "                pass"),
    Mutant("a launcher never gives up", _MEMBER, "if unled_s >= self._patience_s() and", "if False and"),
    Mutant(
        "an old commit is taken",
        _MEMBER,
        "if decision.number <= self.memory.number:\n            return",
        "if False:\n            return",
    ),
    Mutant(
        "the end of another cycle is taken",
        _MEMBER,
        "if end.cycle != self.standing.cycle:\n            return",
        "if False:\n            return",
    ),
    Mutant(
        "a diagnosis asks no launcher that has just gone",
        _JOB_CYCLE,
        "asked = links.keys() | {place for place in range(len(self.seats)) if place not in self.gone}",
        "asked = links.keys() | self._missing",
    ),
    Mutant(
        "a failure explains no lost peer",
        _JOB_CYCLE,
        "elif self.diagnosis is not None and self.diagnosis.is_of_lost_peer and self._has_own_failure:",
        "elif False:",
    ),
    Mutant(
        "a diagnosis of a lost peer names no rank",
        _JOB_CYCLE,
        "if found is None:  # the report on",
        "if True:  # the report on",
    ),
    Mutant(
        "a node whose connection the kernel gave up is lost at once",
        _NODES,
        "return max(self.gone_s, self.heard_s + limit_s)",
        "return self.gone_s",
        unit=f"{_COORDINATOR_TESTS}::test_node_whose_kernel_connection_was_given_up_is_lost_only_once_it_was_silent_for_long_enough",
    ),
    Mutant(
        "that a node has cut itself off isn't told where it waits",
        _MEMBER,
        "[actions.Transmit(report)] if self._is_open else []",
        "[]",
        unit=f"{_MACHINES}::test_a_coordinator_that_does_not_lead_yet_hears_that_this_node_has_ended_its_ranks_meanwhile",
    ),
    Mutant(
        "an absent launcher is to say why the last cycle ended",
        _NOTICES,
        "(proposal is None or (node is not None and node.link is not None))",
        "True",
        unit=f"{_TAKING_OVER}::test_why_the_last_cycle_ended_is_said_by_one_that_is_here_while_the_next_one_is_agreed_on",
    ),
    Mutant(
        "launchers that found another coordinator count as searching",
        _CONSENSUS,
        "if other.address:",
        "if False:",
        unit=f"{_TAKING_OVER}::test_launchers_that_came_before_another_lead_was_known_no_longer_count_as_searching",
    ),
    Mutant(
        "a launcher in search is awaited as one that comes back at once",
        _NODES,
        "(search_s if self.is_in_search else missing_s)",
        "missing_s",
        unit=f"{_COORDINATOR_TESTS}::test_launcher_that_gave_up_waiting_for_an_answer_is_awaited_as_long_as_one_that_never_came",
    ),
    Mutant(
        "a node that was only cut off is named where too few are healthy",
        _VERDICT,
        "return Cause(kind=CauseKind.MEMBERSHIP, text=text), place, True",
        "return Cause(kind=CauseKind.MEMBERSHIP, text=text), decided_by, True",
        unit=f"{_ENDINGS}::test_node_that_was_only_cut_off_is_not_named_where_too_few_are_healthy",
    ),
    Mutant(
        "an exclusion hides the failure before it",
        _JOB_CYCLE,
        "if report.state is NodeState.EXCLUDED and has_ended_it:",
        "if False:",
        unit=f"{_ENDINGS}::test_failure_just_before_an_exclusion_of_the_same_node_is_what_ended_the_cycle",
    ),
    Mutant(
        "a farewell to another coordinator isn't believed",
        _COORDINATOR,
        "if (former := self._nodes.get(hello.former_instance)) is not None:",
        "if (former := self._nodes.get(hello.former_instance)) is not None and False:",
        unit=f"{_COORDINATOR_TESTS}::test_exclusion_of_a_node_costs_no_restart_where_its_goodbye_went_to_another_coordinator",
    ),
    Mutant(
        "nodes that come and go keep a round open for ever",
        _NEXT_CYCLE,
        "self.alarm_s = min(self._settled_s + call_s, self._met_s + max(call_s, rules.join_timeout_s))",
        "self.alarm_s = self._settled_s + call_s",
        unit=f"{_MACHINES}::test_nodes_that_come_and_go_do_not_keep_a_round_open_for_ever",
    ),
    Mutant("a verdict isn't remembered", _MEMBER, "self.standing = replace(self.standing, verdict=message)", "pass"),
    Mutant("a report isn't remembered", _MEMBER, "self.standing = replace(self.standing, report=message)", "pass"),
    Mutant(
        "a silent coordinator isn't left",
        _MEMBER,
        "elif self._is_open and now >= self._heard_s + self._lost_s:",
        "elif False:",
    ),
    Mutant("an accepted end is forgotten", _PATIENCE, "accepted.held.decision.kind is DecisionKind.END:", "False:"),
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
        unit="tests/unit/core/memory/test_choice.py::"
        "test_newest_snapshot_that_each_node_has_of_its_own_ranks_is_chosen",
    ),
    Mutant("an older snapshot than the newest", _CHOICE, "reverse=True)", "reverse=False)"),
    Mutant("a snapshot that not all nodes have", _CHOICE, "if missing is None:", "if True:"),
    Mutant(
        "a snapshot that nobody serves",
        _CHOICE,
        "if each.port and (serves",
        "if (serves",
        unit="tests/unit/core/memory/test_choice.py::test_segments_that_no_keeper_serves_are_not_chosen",
    ),
    Mutant(
        "a snapshot of other ranks",
        _CHOICE,
        "for rank in ranks if rank not in found.ranks",
        "for rank in ()",
        unit="tests/unit/core/memory/test_choice.py::"
        "test_newest_snapshot_that_each_node_has_of_its_own_ranks_is_chosen",
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
        "restored is not None and len(self._restored) == self._nodes",
        "restored is not None and len(self._restored) == 1",
    ),
    Mutant(
        "what was complete is given up at a takeover", _COORDINATOR, "if standing.complete is not None:", "if False:"
    ),
    Mutant(
        "a decision without votes forgets the snapshot",
        _NEXT_CYCLE,
        "restore=decision.restore,",
        "restore=None,",
        unit="tests/unit/core/coordinator/test_complete_snapshots.py::"
        "test_vote_without_lost_nodes_keeps_what_the_cycle_restores",
    ),
    Mutant(
        "a cycle that ends before its nodes meet had no ranks",
        _AGENT,
        " or self._kept.local_ranks",
        "",
        unit="tests/unit/core/agent/test_agent_snapshots.py::"
        "test_node_whose_cycle_ended_before_its_ranks_were_known_is_ready_with_the_number_of_ranks_it_had_before",
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
        unit=f"{_MACHINES}::test_verdict_on_an_earlier_cycle_is_not_remembered_as_that_on_the_one_that_runs",
    ),
    Mutant(
        "old news of another coordinator are followed",
        _LOCATOR,
        "is_old = address in self._tried_s and now_s - age_s <= self._tried_s[address]",
        "is_old = False",
        unit="tests/unit/core/job/test_waiting.py::"
        "test_news_older_than_the_last_try_do_not_lead_back_to_a_coordinator_that_does_not_lead",
    ),
    Mutant(
        "a node on standby that may have a vote is dismissed",
        _COORDINATOR,
        "if node.memory.accepted is None and self._admission",
        "if self._admission",
        unit=f"{_COORDINATOR_TESTS}::test_node_on_standby_that_may_have_a_vote_is_not_dismissed_when_all_voters_have_left",
    ),
    Mutant(
        "a bad node is chosen like the others",
        _BAD_NODES,
        "return frozenset(node.instance for node in nodes if node.bad or node.name in names)",
        "return frozenset()",
    ),
    Mutant("excluded nodes count as left", _NEXT_CYCLE, "return here - leaving + ", "return here + "),
    Mutant(
        "a part of the job waits as long as a new one",
        _PATIENCE,
        "return join_s if is_new(memory, standing) else min(join_s, GIVE_UP_S)",
        "return join_s",
    ),
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
