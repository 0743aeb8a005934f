"""Learned timeouts: which a run may learn, what is kept between runs, and which apply under today's configuration.

In seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.timeouts.budget_rule import Known
from megatron_ft.core.timeouts.in_force import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.core.timeouts.over_all_ranks import Calculation
from megatron_ft.core.wording import counted

SECTIONS_FIELD = "rank_section_timeouts"
OUT_FIELD = "rank_out_of_section_timeout"
HEARTBEAT_FIELDS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
CONFIGURED_FIELDS = (SECTIONS_FIELD, OUT_FIELD, *HEARTBEAT_FIELDS)
"""The fields of the configuration that a learned timeout stands in for."""


@dataclass(frozen=True, kw_only=True)
class LearnedTimeout:
    """One learned timeout, and what it came from where that is known."""

    timeout_s: float
    previous_s: float | None = None
    """The timeout in force before; None is infinite (or not known)."""
    max_observed_s: float | None = None
    """The longest interval over all ranks."""
    rank_of_max: int | None = None
    """The rank that had it."""
    first_s: float | None = None
    """The timeout of the first intervals of a cycle, where it is another one."""
    suspect_s: float | None = None
    """When an interval is suspected, if that is before ``timeout_s``."""


@dataclass(frozen=True, kw_only=True)
class LearnedState:
    """All that was learned, and under which configured values."""

    sections: Mapping[str, LearnedTimeout] = field(default_factory=dict)
    out_of_section: LearnedTimeout | None = None
    heartbeats: tuple[float, float] | None = None
    """(to the first heartbeat, between heartbeats)"""
    configured: Mapping[str, Any] | None = None
    """The fields of :data:`CONFIGURED_FIELDS` that were set when this was learned; None: not known."""
    written_at_unix_s: float | None = None
    world_size: int | None = None
    layout: Mapping[str, int] | None = None
    """Sizes of the parallel groups by kind ("tensor": 2); None: not known."""

    known: Mapping[str, Known] = field(default_factory=dict)
    """By section, and OUT_OF_SECTION: what the rule `budget` goes on from."""

    def entries(self) -> Iterator[tuple[str, LearnedTimeout]]:
        """All learned timeouts, with their names."""
        yield from self.sections.items()
        if self.out_of_section is not None:
            yield OUT_OF_SECTION, self.out_of_section

    def entry(self, name: str) -> LearnedTimeout | None:
        """The entry of a section, or of the time out of section."""
        return self.out_of_section if name == OUT_OF_SECTION else self.sections.get(name)


@dataclass(frozen=True, kw_only=True)
class Superseded:
    """A learned timeout that gives way, because the user has changed the configured value since."""

    name: str
    learned_s: float
    configured_then_s: float | None
    configured_now_s: float | None

    def describe(self) -> str:
        """Which timeout gives way and why, in one line."""
        return (
            f"'{self.name}' keeps its configured timeout of {seconds(self.configured_now_s)}: it was changed "
            f"(from {seconds(self.configured_then_s)}) since {seconds(self.learned_s)} was learned"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which learned timeouts to use."""

    sections: Mapping[str, float] = field(default_factory=dict)
    out_of_section: float | None = None
    heartbeats: tuple[float, float] | None = None
    superseded: tuple[Superseded, ...] = ()
    unknown: tuple[str, ...] = ()
    """Learned sections that this run doesn't have."""

    @property
    def timeouts(self) -> dict[str, float]:
        """Every section's and, as ``out_of_section``, the time between them."""
        out = {} if self.out_of_section is None else {OUT_OF_SECTION: self.out_of_section}
        return {**self.sections, **out}

    @property
    def is_empty(self) -> bool:
        """Nothing learned applies."""
        return not self.timeouts and self.heartbeats is None

    def client_state(self) -> dict[str, Any]:
        """For ``RankMonitorClient.load_state_dict``."""
        return state_to_dict(
            None if self.heartbeats is None else HeartbeatTimeouts(*self.heartbeats, True),
            SectionTimeouts(self.sections, self.out_of_section, set(self.sections), self.out_of_section is not None),
        )


def seconds(value: float | None) -> str:
    """A timeout for a person to read."""
    return "infinity" if value is None else f"{value:.4g} s"


def describe_difference(state: LearnedState, *, world_size: int, layout: Mapping[str, int] | None) -> str | None:
    """One line if a job of another size or layout learned this; None if not, or if that isn't known."""
    sizes_differ = state.world_size is not None and state.world_size != world_size
    layouts_differ = state.layout is not None and layout is not None and dict(state.layout) != dict(layout)
    if not sizes_differ and not layouts_differ:
        return None
    then, now = _ranks(state.world_size, state.layout), _ranks(world_size, layout)
    return f"they were learned with {then}, and this run has {now}: the longest intervals may be others now"


def _ranks(world_size: int | None, layout: Mapping[str, int] | None) -> str:
    count = "an unknown number of ranks" if world_size is None else counted(world_size, "rank")
    return count if layout is None else f"{count} ({', '.join(f'{kind} {size}' for kind, size in layout.items())})"


def choose(
    state: LearnedState, *, configured: Mapping[str, Any], known_sections: frozenset[str], floor_s: float
) -> Choice:
    """Which learned timeouts apply: all but those whose configured value the user has changed since.

    Args:
        state: what was learned.
        configured: today's fields of :data:`CONFIGURED_FIELDS`, only those that the user set.
        known_sections: names of today's sections.
        floor_s: least learned section timeout.
    """
    superseded: list[Superseded] = []

    def applies(name: str, learned_s: float, now: Mapping[str, Any], then: Mapping[str, Any], key: str) -> bool:
        if key not in now or state.configured is None or now[key] == then.get(key):
            return True  # the user says nothing, nothing is known of then, or it is as it was
        superseded.append(
            Superseded(
                name=name,
                learned_s=learned_s,
                configured_then_s=then.get(key),
                configured_now_s=now[key],
            )
        )
        return False

    then = state.configured or {}
    now_sections, then_sections = configured.get(SECTIONS_FIELD) or {}, then.get(SECTIONS_FIELD) or {}
    sections = {
        name: max(entry.timeout_s, floor_s)
        for name, entry in state.sections.items()
        if name in known_sections and applies(name, entry.timeout_s, now_sections, then_sections, name)
    }
    out = state.out_of_section
    if out is not None and not applies(OUT_OF_SECTION, out.timeout_s, configured, then, OUT_FIELD):
        out = None
    beats = state.heartbeats
    if beats is not None:
        # one pair: it is loaded as a whole or not at all
        kept = [applies(key, value, configured, then, key) for key, value in zip(HEARTBEAT_FIELDS, beats, strict=True)]
        beats = beats if all(kept) else None
    return Choice(
        sections=sections,
        out_of_section=None if out is None else max(out.timeout_s, floor_s),
        heartbeats=beats,
        superseded=tuple(superseded),
        unknown=tuple(sorted(set(state.sections) - known_sections)),
    )


def from_client(
    client_state: Mapping[str, Any],
    *,
    last_calculation: Mapping[str, Calculation],
    earlier: LearnedState | None,
    configured: Mapping[str, Any],
    written_at_unix_s: float,
    world_size: int,
    layout: Mapping[str, int] | None = None,
    known: Mapping[str, Known] | None = None,
) -> LearnedState:
    """What to write to the file now.

    Args:
        client_state: ``RankMonitorClient.state_dict()``: the timeouts.
        last_calculation: by name, of what this run calculated.
        earlier: what is in the file now; where a timeout that wasn't calculated anew came from is kept.
        configured: see :func:`choose`.
        written_at_unix_s: wall clock.
        world_size: number of ranks.
        layout: sizes of the parallel groups, None if not known.
        known: what the rule `budget` goes on from; nothing is what the file holds now.
    """
    calculated = state_from_dict(client_state)

    def entry(name: str, timeout_s: float) -> LearnedTimeout:
        new = last_calculation.get(name)
        if new is not None:
            return LearnedTimeout(
                timeout_s=timeout_s,
                previous_s=new.previous_s,
                max_observed_s=new.max_observed_s,
                rank_of_max=new.rank_of_max,
                first_s=new.first_s,
                suspect_s=new.suspect_s,
            )
        old = None if earlier is None else earlier.entry(name)
        return old if old is not None and old.timeout_s == timeout_s else LearnedTimeout(timeout_s=timeout_s)

    out = calculated.out_of_section
    return LearnedState(
        sections={name: entry(name, timeout) for name, timeout in sorted(calculated.sections.items())},
        out_of_section=None if out is None else entry(OUT_OF_SECTION, out),
        heartbeats=calculated.heartbeats,
        configured={key: configured[key] for key in CONFIGURED_FIELDS if key in configured},
        written_at_unix_s=written_at_unix_s,
        world_size=world_size,
        layout=layout,
        known=known or ({} if earlier is None else earlier.known),
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Which timeouts are learned now, and one line for each that isn't."""

    sections: tuple[str, ...]
    out_of_section: bool
    reasons: tuple[str, ...]


def choose_update(
    *,
    is_persistent_chkpt_loaded: bool,
    is_setup_open: bool,
    has_seen_enough_steps: bool,
    has_saved: bool,
    is_async_save: bool,
    is_closing: bool,
) -> Update:
    """Decide which timeouts to learn.

    Args:
        is_persistent_chkpt_loaded: "setup" held the load of a checkpoint from storage; without one, or with
            one from memory, it was shorter than others will be.
        is_setup_open: "setup" isn't over yet.
        has_seen_enough_steps: enough training iterations for the longest to be typical.
        has_saved: there was a save.
        is_async_save: how much of an asynchronous save falls into "checkpointing" differs between runs.
        is_closing: the run ends; until then the longest time out of section may be yet to come.
    """
    sections: list[str] = []
    reasons: list[str] = []
    if not is_persistent_chkpt_loaded:
        reasons.append("the timeout of 'setup' is learned in a run that loads a persistent checkpoint")
    elif is_setup_open:
        reasons.append("the timeout of 'setup' isn't learned before its end")
    else:
        sections.append("setup")
    if has_seen_enough_steps:
        sections.append("step")
    else:
        reasons.append("the timeout of 'step' isn't learned before more training iterations were seen")
    if not has_saved:
        reasons.append("the timeout of 'checkpointing' is learned after a save")
    elif is_async_save:
        reasons.append("the timeout of 'checkpointing' isn't learned with asynchronous saves")
    else:
        sections.append("checkpointing")
    out_of_section = is_closing and has_saved and "setup" in sections and "step" in sections
    if is_closing and not out_of_section:
        reasons.append("the out-of-section timeout isn't learned: that takes a load, enough iterations and a save")
    return Update(sections=tuple(sections), out_of_section=out_of_section, reasons=tuple(reasons))
