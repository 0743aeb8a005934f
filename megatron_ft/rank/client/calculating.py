"""From what one rank has recorded to new section timeouts, with all other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_ft.core.timeouts.budget_rule import Known, after_kill
from megatron_ft.core.timeouts.over_all_ranks import (
    BUDGET,
    NO_OBSERVATION,
    Calculation,
    NotReady,
    Rule,
    Sight,
    calculate_sections,
)
from megatron_ft.core.timeouts.timeouts import OUT_OF_SECTION, SectionTimeouts
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.recorder import Recorder

__all__ = ["Enforced", "Knowledge", "max_over_ranks", "seconds", "section_timeouts"]


class Enforced(NamedTuple):
    """What the monitor goes by; times are seconds, by section and OUT_OF_SECTION."""

    timeouts: SectionTimeouts
    first: Mapping[str, float]
    """Of the first intervals of a cycle, where it is another one."""
    suspect: Mapping[str, float]
    """When an interval is suspected, where that is before its timeout."""


class Knowledge:
    """What all ranks know of each section, and what was calculated last."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.first_timeouts: dict[str, float] = {}
        """Of the first intervals of a cycle, where it is another one; seconds."""
        self.suspect_after: dict[str, float] = {}
        """When an interval is suspected, where that is before its timeout; seconds."""
        self.last_calculation: dict[str, Calculation] = {}
        self.raised: dict[str, float] = {}
        """Factors of those that have ended a rank in the last cycle, until more is known of them."""

    def enforced(self, timeouts: SectionTimeouts, floor_s: float) -> Enforced:
        """What the monitor enforces now."""
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
        """A collective: what was raised on the node of one rank is on all."""
        factors, _ = max_over_ranks([self.raised.get(name, 1.0) for name in names])
        self.raised = {name: factor for name, factor in zip(names, factors, strict=True) if factor > 1.0}

    def note(self, calculations: Mapping[str, Calculation]) -> None:
        """These were calculated now."""
        for name, calculation in calculations.items():
            self.last_calculation[name] = calculation
            self.raised.pop(name, None)  # it has ended, on some rank
            _keep(self.first_timeouts, name, calculation.first_s)
            _keep(self.suspect_after, name, calculation.suspect_s)


def _keep(values: dict[str, float], name: str, value: float | None) -> None:
    values.pop(name, None)
    if value is not None:
        values[name] = value


def seconds(ns: int) -> float:
    """Nanoseconds to seconds; what is negative wasn't observed."""
    return ns / 1e9 if ns >= 0 else NO_OBSERVATION


def section_timeouts(
    recorder: Recorder, timeouts: SectionTimeouts, names: Sequence[str], rule: Rule, knowledge: Knowledge
) -> tuple[SectionTimeouts, dict[str, Calculation]] | NotReady:
    """A collective: the new timeouts of these sections; OUT_OF_SECTION may be among them."""
    longest = recorder.observed()
    observed = {name: seconds(longest[name]) for name in names}
    going_on = {name: seconds(age) for name, age in recorder.going_on().items()}
    sights = {}
    if rule.name == BUDGET:
        for name in names:
            tail, passed = recorder.seen[name].new(recorder.ended(name))
            known = after_kill(knowledge.known.get(name, Known()), knowledge.raised.get(name, 1.0))
            sights[name] = Sight(known, tail, passed, seconds(recorder.seen[name].first_ns))
    result = calculate_sections(observed, timeouts, rule, max_over_ranks, going_on, sights)
    if isinstance(result, NotReady):
        return result
    knowledge.note(result[1])
    knowledge.known.update({name: sight.known for name, sight in sights.items()})
    recorder.settle(sights)
    return result


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
