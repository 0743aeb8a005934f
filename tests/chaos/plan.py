"""What a chaos run does to its job, drawn from a seed: which faults, each at which phase of which rank. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RANKS = 2
ITERATIONS = 10
SAVE_INTERVAL = 3
EVAL_INTERVAL = 4


class Outcome:
    """What a fault has to come to."""

    ENDS = "the cycle ends, and its rank is the cause"
    NOTHING = "training goes on"
    MAY_END = "the rank is terminated as hung, or treated as finished, as the others are"
    LEAVES = "the launcher ends, with the job; the same command goes on from the last checkpoint"


_HANG = (
    r"rank {rank}( \(\w+\))? hung |"
    r"hang detected \(first on rank \d+: .*root cause undetermined; candidates: .*rank {rank}\b"
)


class Fault(NamedTuple):
    """Kind of faults: what one has to come to, and the cause that the launcher has to name.

    ``by``: the rank itself, or the campaign while the rank waits. ``only``, ``never``: phases.
    """

    outcome: str
    cause: str = ""
    by: str = "campaign"
    weight: int = 1
    only: Sequence[str] = ()
    never: Sequence[str] = ()
    needs_memory: bool = False
    """There is none where the job keeps no state in memory."""


def _own(cause: str, outcome: str = Outcome.ENDS, **more: Any) -> Fault:
    return Fault(outcome, cause, by="rank", **more)


_KILLED = r"rank {rank} killed by SIGKILL \(not sent by ft_launcher\)"
_WITHOUT_BOARD = ("start", "exit")
"""Else "step", "evaluation", "save", "written" (the files of a save are there and aren't final), "finalization"."""
_OF_BOARD: dict[str, Any] = {"outcome": Outcome.NOTHING, "never": _WITHOUT_BOARD}
FAULTS = {
    "rank_killed": _own(_KILLED, weight=3),
    "rank_hung": _own(_HANG),
    "sleep": _own(_HANG),
    "gil": _own(_HANG),
    "exception": _own(r"rank {rank} raised InjectedFault", weight=2),
    "segfault": _own(r"rank {rank} crashed with SIGSEGV"),
    "exit": _own(r"rank {rank} exited with code [3-9]\b"),
    "board": _own("", **_OF_BOARD),
    "monitor_killed": Fault(**_OF_BOARD),
    "monitor_stopped": Fault(**_OF_BOARD),
    "server_killed": Fault(Outcome.NOTHING),
    "server_stopped": Fault(Outcome.NOTHING),
    "node_suspended": Fault(Outcome.NOTHING),
    "clock_stepped": Fault(Outcome.NOTHING),
    "run_dir_removed": Fault(Outcome.NOTHING),
    "state_disk_full": Fault(Outcome.NOTHING, only=("shutdown",)),
    "disk_full": Fault(Outcome.ENDS, r"rank \d+ (raised|exited with) ", only=("save",)),
    "launcher_term": Fault(Outcome.LEAVES),
    "launcher_int": Fault(Outcome.LEAVES),
    "launcher_killed": Fault(Outcome.LEAVES, weight=2),
    # some milliseconds after a save has begun
    "rank_killed_soon": _own(_KILLED, weight=4, only=("memory",), needs_memory=True),
    "keeper_killed": Fault(Outcome.NOTHING, weight=2, needs_memory=True),
    "keeper_stopped": Fault(Outcome.NOTHING, needs_memory=True),
    "launcher_and_keeper_killed": Fault(Outcome.LEAVES, needs_memory=True),
}
HANGS = ("rank_hung", "sleep", "gil")
_BETWEEN = ("server_killed", "server_stopped", "launcher_term", "launcher_int", "launcher_killed", "node_suspended")
"""What can happen while there is no rank that waits for it: at the rendezvous."""
_GOES_ON = {"rank_killed_soon": 4}
"""Iterations that a rank may do before such a fault comes, and that the next cycle goes on from."""
_BEFORE_TRAINING = ("start", "setup", "load")
_AT_END = ("shutdown", "exit")
LAYOUTS: Mapping[str, Sequence[str]] = {
    "dp": (),
    "async": ("--async-save",),
    "tp": ("--tensor-model-parallel-size=2",),
    "pp": ("--pipeline-model-parallel-size=2",),
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fault. ``iteration`` is -1 where the phase has none. On hosts the phase is which one, for so many seconds.

    Args:
        launch: of which launcher, from 0; cycle: of its cycles.
        rank: whose phase it is; of a fault of the node the rank that tells when.
    """

    fault: str
    phase: str
    launch: int
    cycle: int
    rank: int
    iteration: int = -1
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return outcome_of(self.fault, self.phase)

    @property
    def is_at_end(self) -> bool:
        """All iterations are done and saved."""
        return self.phase in _AT_END

    def describe(self) -> str:
        at = f"{self.phase}, iteration {self.iteration}" if self.iteration >= 0 else self.phase
        return f"{self.fault} of rank {self.rank} at {at}, in cycle {self.cycle} of launch {self.launch}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Args:
        preload: the launcher's --ft-preload.
        learns: with --calc-ft-timeouts.
        memory: the state is kept in memory after each iteration.
    """

    seed: int
    layout: str
    preload: str
    learns: bool
    events: tuple[Event, ...] = field(default=())
    memory: bool = False

    @property
    def needs_small_disk(self) -> bool:
        """Its checkpoints are to be on a file system of their own, that can be filled."""
        return any(event.fault in ("disk_full", "state_disk_full") for event in self.events)

    @property
    def steps_clock(self) -> bool:
        """Its wall clock isn't the machine's."""
        return any(event.fault == "clock_stepped" for event in self.events)

    def describe(self) -> str:
        more = f", --ft-preload {self.preload}" + (", learns" if self.learns else "") + (", memory" * self.memory)
        return f"seed {self.seed} ({self.layout}{more}): " + "; ".join(event.describe() for event in self.events)


def outcome_of(fault: str, phase: str) -> str:
    if phase == "exit" and fault in HANGS:
        return Outcome.MAY_END
    return FAULTS[fault].outcome


def expected_cause(event: Event, *, forked: bool) -> str:
    """The pattern that the cause of its cycle has to match; ``forked``: ranks are forks of the launcher's server."""
    pattern = FAULTS[event.fault].cause
    if event.phase == "start" and event.fault in HANGS:
        pattern += r"|rank {rank}( \(\w+\))? did not start monitoring within "
    if event.phase == "start" and event.fault == "exception" and not forked:
        pattern = r"rank {rank} exited with code 1"  # a fresh interpreter that isn't monitored yet tells no more
    return pattern.format(rank=event.rank)


def draw(seed: int, *, memory: bool = False) -> Plan:
    """The run of that seed: one to three faults, of which some hit both ranks at once."""
    chance = random.Random(f"memory {seed}" if memory else seed)
    layout = chance.choice(("dp", "dp", "dp", "async", "async", "tp", "pp"))
    learns = chance.random() < 0.4
    preload = chance.choice((*["megatron"] * 6, "default", "none"))
    events: list[Event] = []
    launch = cycle = 0
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        drawn = _event(chance, layout, learns, memory, launch, cycle, events)
        events += drawn
        if drawn[0].outcome == Outcome.ENDS:
            cycle += 1
        elif drawn[0].outcome == Outcome.LEAVES:
            launch, cycle = launch + 1, 0
        elif drawn[0].outcome == Outcome.MAY_END:
            break
    return Plan(seed=seed, layout=layout, preload=preload, learns=learns, events=tuple(events), memory=memory)


def _event(
    chance: random.Random,
    layout: str,
    learns: bool,
    memory: bool,
    launch: int,
    cycle: int,
    before: Sequence[Event],
) -> list[Event]:
    """One fault, which may hit both ranks, after those ``before``."""
    now = {"launch": launch, "cycle": cycle}
    is_first = not any((event.launch, event.cycle) == (launch, cycle) for event in before)
    if before and is_first and cycle > 0 and chance.random() < 0.2:
        return [Event(fault=chance.choice(_BETWEEN), phase="rendezvous", rank=0, **now)]
    if is_first and chance.random() < (0.4 if before else 0.2):
        phase, iteration = chance.choice(_BEFORE_TRAINING), -1
    else:
        phase, iteration = _place(chance, layout, before, memory=memory)
    fault = _fault(chance, phase, learns=learns, memory=memory)
    rank = 0 if phase == "written" else chance.randrange(RANKS)
    event = Event(fault=fault, phase=phase, rank=rank, iteration=iteration, **now)
    is_double = fault == "rank_killed" and phase != "written" and chance.random() < 0.25
    return [event, dataclasses.replace(event, rank=1 - rank)] if is_double else [event]


def _place(chance: random.Random, layout: str, before: Sequence[Event], *, memory: bool) -> tuple[str, int]:
    """A phase and an iteration that a rank comes to that goes on from the last checkpoint before all these."""
    if any(event.phase in _AT_END for event in before):
        return "exit" if before[-1].phase in _AT_END and before[-1].outcome == Outcome.NOTHING else "shutdown", -1
    least = max((event.iteration + _GOES_ON.get(event.fault, 0) for event in before), default=-1)
    phases = ["step", "step", "save", "evaluation", "shutdown", "exit", *(["memory"] * 4 if memory else [])]
    # an asynchronous save may be final long after its iteration: then "written" is anywhere
    phase = chance.choice([*phases, *(["finalization"] * 2 if layout == "async" else ["written"])])
    later = [iteration for iteration in _iterations(phase) if iteration > least]
    return (phase, chance.choice(later)) if later else (phase if phase in _AT_END else "shutdown", -1)


def _iterations(phase: str) -> Sequence[int]:
    """At which a rank comes to that phase."""
    saves = [*range(SAVE_INTERVAL, ITERATIONS, SAVE_INTERVAL), ITERATIONS]
    return {
        "step": range(ITERATIONS),
        "evaluation": range(EVAL_INTERVAL, ITERATIONS, EVAL_INTERVAL),
        "save": saves,
        "memory": range(1, ITERATIONS - _GOES_ON["rank_killed_soon"]),
        "written": saves,
        "finalization": [save + more for save in saves for more in (0, 1) if save + more <= ITERATIONS],
    }.get(phase, ())


def _fault(chance: random.Random, phase: str, *, learns: bool, memory: bool) -> str:
    weights = {
        name: fault.weight
        for name, fault in FAULTS.items()
        if phase in (fault.only or (phase,)) and phase not in fault.never and (memory or not fault.needs_memory)
    }
    if not learns:
        weights.pop("state_disk_full", None)
    return chance.choices(list(weights), list(weights.values()))[0]
