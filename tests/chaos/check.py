"""What has to be true after each chaos run. Pure: from what was seen to a list of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plan import Event, Outcome, Plan, expected_cause

Record = Mapping[str, Any]
_EXIT_CODES = {
    "launcher_killed": (-9,),
    "launcher_and_keeper_killed": (-9,),
    "launcher_int": (130,),
    "launcher_term": (0, 1),
}
"""After SIGTERM it ends with 0 if all ranks do, which save and end then."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launcher.

    Args:
        number: among those of one run.
        code: its exit code (None: it had to be ended).
        records: of its event log.
    """

    number: int
    code: int | None
    records: Sequence[Record] = ()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One run of a plan.

    Args:
        trace: what the ranks have noted, in the order of time (see ``job.Rank.note``).
        weights: the hash of the final ones, None if there is none; undisturbed: that of the run without faults.
        left: what was still there after the end.
        missed: numbers of the faults that were done from outside and hit nothing: no process, no file.
    """

    plan: Plan
    launches: Sequence[Launch]
    trace: Sequence[Record]
    weights: str | None
    undisturbed: str
    left: Sequence[str] = field(default=())
    missed: Set[int] = field(default=frozenset())

    def happened(self) -> set[int]:
        return {record["number"] for record in self.trace if record["what"] == "fault"}

    def hit(self) -> set[int]:
        """Numbers of those that have also hit something."""
        return self.happened() - self.missed

    def fired(self, launch: int, cycle: int) -> list[Event]:
        """The faults of that cycle that have happened."""
        happened = self.happened()
        events = enumerate(self.plan.events)
        return [e for number, e in events if number in happened and (e.launch, e.cycle) == (launch, cycle)]

    def ended(self) -> Iterator[tuple[int, Record]]:
        for launch in self.launches:
            yield from ((launch.number, record) for record in launch.records if record["ev"] == "cycle_ended")


def problems(seen: Seen) -> list[str]:
    return [problem for check in CHECKS for problem in check(seen)]


def it_ended_as_it_should(seen: Seen) -> Iterator[str]:
    """The last launcher with 0, those before it as their fault has it."""
    hit = seen.hit()
    events = enumerate(seen.plan.events)
    left_by = {event.launch: event for number, event in events if number in hit and event.outcome == Outcome.LEAVES}
    for launch in seen.launches:
        asked = left_by.get(launch.number)
        allowed = (0,) if asked is None else _EXIT_CODES[asked.fault]
        if asked is not None and asked.is_at_end:
            allowed = (*allowed, 0)  # all ranks were done before they heard of it
        if launch.code not in allowed:
            what = "didn't end" if launch.code is None else f"ended with code {launch.code}"
            yield f"launch {launch.number} {what}, and not with {' or '.join(map(str, allowed))}"
    if seen.launches[-1].code != 0:
        yield "the last launch didn't end well"


def the_weights_are_those_of_the_undisturbed_run(seen: Seen) -> Iterator[str]:
    """To the last bit."""
    if seen.weights != seen.undisturbed:
        yield f"the final weights are {seen.weights}, not {seen.undisturbed}"


def nothing_saved_is_redone(seen: Seen) -> Iterator[str]:
    """A cycle goes on from the last checkpoint that was final before it began."""
    saved = 0
    for record in seen.trace:
        if record["what"] == "saved":
            saved = max(saved, record["iteration"])
        elif record["what"] == "began" and record["iteration"] < saved:
            at = f"cycle {record['cycle']} of launch {record['launch']}"
            yield f"{at} began at iteration {record['iteration']}, though {saved} was saved"


def every_cause_is_named(seen: Seen) -> Iterator[str]:
    """A fault that ends its cycle ends it, and is what the launcher says it was."""
    for event in seen.plan.events:
        fired = [e for e in seen.fired(event.launch, event.cycle) if e.outcome in (Outcome.ENDS, Outcome.MAY_END)]
        if event not in fired or event.outcome != Outcome.ENDS:
            continue
        place = (event.launch, event.cycle)
        ended = [record for launch, record in seen.ended() if (launch, record["cycle"]) == place]
        if not ended:
            yield f"no end of its cycle is logged: {event.describe()}"
        elif all(record["outcome"] == "succeeded" for record in ended):
            yield f"its cycle succeeded: {event.describe()}"
        elif not any(_is_named(each, record, seen.plan) for each in fired for record in ended):
            causes = sorted({_cause(record) for record in ended})
            yield f"{event.describe()}: but the cause that is named is {' and '.join(map(repr, causes))}"


def nobody_healthy_is_killed(seen: Seen) -> Iterator[str]:
    """A cycle doesn't fail without a fault that ends it."""
    for launch, record in seen.ended():
        fired = seen.fired(launch, record["cycle"])
        if record["outcome"] == "succeeded" or any(event.outcome != Outcome.NOTHING for event in fired):
            continue
        rendezvous = seen.fired(launch, record["cycle"] + 1)
        if not any(e.phase == "rendezvous" and e.outcome == Outcome.LEAVES for e in rendezvous):
            did = ", ".join(event.fault for event in fired) or "no fault"
            yield f"cycle {record['cycle']} of launch {launch} ended with {did}: {_cause(record)!r}"


def nothing_is_left(seen: Seen) -> Iterator[str]:
    """No process, file or shared memory."""
    yield from (f"left: {what}" for what in seen.left)


CHECKS = (
    the_weights_are_those_of_the_undisturbed_run,
    nothing_saved_is_redone,
    every_cause_is_named,
    nobody_healthy_is_killed,
    nothing_is_left,
    it_ended_as_it_should,
)


def _is_named(event: Event, record: Record, plan: Plan) -> bool:
    expected = expected_cause(event, forked=plan.preload != "none")
    return re.fullmatch(f"(?:{expected}).*", _cause(record), re.DOTALL) is not None


def _cause(record: Record) -> str:
    cause = record.get("cause") or {}
    return ", ".join(filter(None, (cause.get("text"), cause.get("detail"))))
