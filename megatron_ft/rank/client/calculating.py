"""From what one rank has recorded to new section timeouts, with all other ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_ft.core.timeouts.budget_rule import Known, after_kill
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, SectionTimeouts
from megatron_ft.core.timeouts.learned import LearnedState
from megatron_ft.core.timeouts.over_all_ranks import (
    BUDGET,
    NO_OBSERVATION,
    Calculation,
    NotReady,
    Rule,
    Sight,
    calculate_sections,
)
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.recorder import Recorder


class Enforced(NamedTuple):
    """The timeouts that the monitor enforces; seconds, by section and OUT_OF_SECTION."""

    timeouts: SectionTimeouts
    first: Mapping[str, float]
    """Timeouts of the first intervals of a cycle, where they differ."""
    suspect: Mapping[str, float]
    """Age at which an interval is suspected, where that is before its timeout."""


class Knowledge:
    """What all ranks know of each section, and what was calculated last."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.first_timeouts: dict[str, float] = {}
        """Timeouts of the first intervals of a cycle, where they differ; seconds."""
        self.suspect_after: dict[str, float] = {}
        """Age at which an interval is suspected, where that is before its timeout; seconds."""
        self.last_calculation: dict[str, Calculation] = {}
        self.raised: dict[str, float] = {}
        """By which factor timeouts are raised that terminated a rank in the last cycle, until they are calculated."""

    def enforced(self, timeouts: SectionTimeouts, floor_s: float) -> Enforced:
        """Return what the monitor is to enforce now; no learned timeout is below ``floor_s``."""
        enforced, first = timeouts.enforced(floor_s), dict(self.first_timeouts)
        usual = self.suspect_after.items()
        suspect = {name: max(after_s, floor_s) for name, after_s in usual if name not in self.raised}
        for name, factor in self.raised.items():
            reference_s = self.known[name].usual_reference_s if name in self.known else None
            now = enforced.out_of_section if name == OUT_OF_SECTION else enforced.section.get(name)
            if now is None:
                continue
            raised = factor * max(now, reference_s or 0.0)
            if name in first:
                first[name] = max(raised, factor * first[name])
            if name == OUT_OF_SECTION and enforced.is_out_of_section_calculated:
                enforced = replace(enforced, out_of_section=raised)
            elif name in enforced.calculated_sections:
                enforced = replace(enforced, section={**enforced.section, name: raised})
        return Enforced(enforced, first, suspect)

    def agree(self, names: Sequence[str]) -> None:
        """Raise on all ranks what is raised on any, of these names. A collective."""
        factors, _ = max_over_ranks([self.raised.get(name, 1.0) for name in names])
        self.raised = {name: factor for name, factor in zip(names, factors, strict=True) if factor > 1.0}

    def load(self, state: LearnedState, chosen: Container[str]) -> None:
        """Take in a state file: what is known of its sections, and what belongs to the ``chosen`` timeouts."""
        self.known.update(state.known)
        for name, entry in state.entries():
            if name in chosen and entry.first_s:
                self.first_timeouts[name] = entry.first_s
            if name in chosen and entry.suspect_s:
                self.suspect_after[name] = entry.suspect_s

    def note(self, calculations: Mapping[str, Calculation]) -> None:
        """Take in what was just calculated."""
        for name, calculation in calculations.items():
            self.last_calculation[name] = calculation
            self.raised.pop(name, None)  # an interval has ended, on some rank
            _set_or_remove(self.first_timeouts, name, calculation.first_s)
            _set_or_remove(self.suspect_after, name, calculation.suspect_s)


def _set_or_remove(values: dict[str, float], name: str, value: float | None) -> None:
    values.pop(name, None)
    if value is not None:
        values[name] = value


def seconds(ns: int) -> float:
    """Nanoseconds to seconds; a negative number means that nothing was observed."""
    return ns / 1e9 if ns >= 0 else NO_OBSERVATION


def section_timeouts(
    recorder: Recorder, timeouts: SectionTimeouts, names: Sequence[str], rule: Rule, knowledge: Knowledge
) -> SectionTimeouts | NotReady:
    """Calculate the timeouts of these sections; OUT_OF_SECTION may be among them. A collective."""
    longest = recorder.observed()
    observed = {name: seconds(longest[name]) for name in names}
    open_ages = {name: seconds(age) for name, age in recorder.open_ages().items()}
    sights = {}
    if rule.name == BUDGET:
        for name in names:
            tail, passed = recorder.seen[name].new(recorder.ended(name))
            known = after_kill(knowledge.known.get(name, Known()), knowledge.raised.get(name, 1.0))
            sights[name] = Sight(known, tail, passed, seconds(recorder.seen[name].first_ns))
    result = calculate_sections(observed, timeouts, rule, max_over_ranks, open_ages, sights)
    if isinstance(result, NotReady):
        return result
    calculated, calculations = result
    knowledge.note(calculations)
    knowledge.known.update({name: sight.known for name, sight in sights.items()})
    recorder.settle(sights)
    return calculated


def max_over_ranks(values: Sequence[float]) -> tuple[list[float], list[int]]:
    """The maximum of each value over all ranks, and the lowest rank that has it.

    Runs two all_reduce of ``len(values)`` doubles on the default process group, on the device its backend
    works on. Without an initialised process group the values are those of a job of one rank.
    """
    if not values or not agreement.has_process_group():
        return list(values), [0] * len(values)
    import torch
    import torch.distributed as dist

    device = _device_of_backend(str(dist.get_backend_config()))
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    maxima = own.clone()
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    world = dist.get_world_size()
    ranks = torch.where(own == maxima, float(dist.get_rank()), float(world))
    dist.all_reduce(ranks, op=dist.ReduceOp.MIN)
    return [float(v) for v in maxima.tolist()], [int(r) for r in ranks.tolist()]


def _device_of_backend(config: str) -> str:
    """Where a tensor must lie for a backend, e.g. ``cpu:gloo,cuda:nccl`` or ``nccl``: the CPU if it can."""
    import torch

    backends = {device: name for device, _, name in (part.rpartition(":") for part in config.lower().split(","))}
    if "cpu" in backends or any(name in ("gloo", "mpi", "fake") for name in backends.values()):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, config
    return str(accelerator.type)
