"""Learned timeouts: which a run may learn, what is kept between runs, and which apply under today's configuration.

In seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.board.intervals import CHECKPOINTING, SETUP, STEP
from megatron_ft.core.codec import Fact, Finite
from megatron_ft.core.timeouts.budget_rule import LEARNED_FLOOR_S, LIMIT, after_kill, learn
from megatron_ft.core.timeouts.exchange import Armed, Learned, LearnedTimeout
from megatron_ft.core.timeouts.in_force import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.sketch import Sketch
from megatron_ft.core.times import MAX_SECONDS
from megatron_ft.core.wording import counted

SECTIONS_FIELD = "rank_section_timeouts"
OUT_FIELD = "rank_out_of_section_timeout"
HEARTBEAT_FIELDS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
CONFIGURED_FIELDS = (SECTIONS_FIELD, OUT_FIELD, *HEARTBEAT_FIELDS)
"""Configuration fields that learned timeouts replace."""


class LearnedState(Fact, frozen=True, kw_only=True):
    """Everything learned, and the configured values at that time."""

    sections: Mapping[str, LearnedTimeout] = {}
    out_of_section: LearnedTimeout | None = None
    heartbeats: tuple[Finite, Finite] | None = None
    """(to the first heartbeat, between heartbeats)"""
    configured: Mapping[str, Any] | None = None
    """Fields of :data:`CONFIGURED_FIELDS` that were set when this was learned; None: unknown."""
    written_at_unix_s: Finite | None = None
    world_size: int | None = None

    known: Mapping[str, Known] = {}
    """State of the rules, by section and OUT_OF_SECTION."""

    @property
    def timeouts(self) -> dict[str, LearnedTimeout]:
        """Timeouts by section and OUT_OF_SECTION."""
        out = {} if self.out_of_section is None else {OUT_OF_SECTION: self.out_of_section}
        return {**self.sections, **out}


@dataclass(frozen=True, kw_only=True)
class Superseded:
    """A learned timeout that doesn't apply, because the user has changed the configured value since."""

    name: str
    learned_s: float
    configured_then_s: float | None
    configured_now_s: float | None

    def describe(self) -> str:
        """Return one line: the timeout, and why it doesn't apply."""
        return (
            f"'{self.name}' keeps its configured timeout of {seconds(self.configured_now_s)}: it was changed "
            f"(from {seconds(self.configured_then_s)}) since {seconds(self.learned_s)} was learned"
        )


class Choice(Fact, frozen=True, kw_only=True):
    """Learned timeouts to use."""

    learned: Mapping[str, LearnedTimeout] = {}
    """Timeouts by section and OUT_OF_SECTION."""
    heartbeats: tuple[Finite, Finite] | None = None
    superseded: tuple[Superseded, ...] = ()
    unknown: tuple[str, ...] = ()
    """Learned sections that this run doesn't have."""

    @property
    def timeouts(self) -> dict[str, float]:
        """Learned timeouts in seconds, without first and limit values."""
        return {name: entry.timeout_s for name, entry in self.learned.items()}

    @property
    def is_empty(self) -> bool:
        """True if nothing learned applies."""
        return not self.learned and self.heartbeats is None


def seconds(value: float | None) -> str:
    """Format a timeout for a person."""
    return "infinity" if value is None else f"{value:.4g} s"


def describe_difference(state: LearnedState, *, world_size: int) -> str | None:
    """Return one line if a job of another size learned this; None if not, or if that isn't known."""
    if state.world_size is None or state.world_size == world_size:
        return None
    then, now = counted(state.world_size, "rank"), counted(world_size, "rank")
    return f"they were learned with {then}, and this run has {now}: the longest intervals may be others now"


def choose(
    state: LearnedState, *, configured: Mapping[str, Any], known_sections: frozenset[str] | None = None
) -> Choice:
    """Return the learned timeouts that apply: all but those whose configured value the user has changed since.

    Args:
        state: what was learned.
        configured: today's fields of :data:`CONFIGURED_FIELDS`, only those that the user set.
        known_sections: names of today's sections; None: not known, all apply.
    """
    superseded: list[Superseded] = []

    def applies(name: str, learned_s: float, now: Mapping[str, Any], then: Mapping[str, Any], key: str) -> bool:
        if key not in now or state.configured is None or now[key] == then.get(key):
            return True  # the user sets nothing, the earlier value is unknown, or it is unchanged
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
    unknown = set() if known_sections is None else set(state.sections) - known_sections
    learned = {
        name: _floored(entry)
        for name, entry in state.sections.items()
        if name not in unknown and applies(name, entry.timeout_s, now_sections, then_sections, name)
    }
    out = state.out_of_section
    if out is not None and applies(OUT_OF_SECTION, out.timeout_s, configured, then, OUT_FIELD):
        learned[OUT_OF_SECTION] = _floored(out)
    beats = state.heartbeats
    if beats is not None:
        # one pair: loaded as a whole or not at all
        kept = [applies(key, value, configured, then, key) for key, value in zip(HEARTBEAT_FIELDS, beats, strict=True)]
        beats = beats if all(kept) else None
    return Choice(learned=learned, heartbeats=beats, superseded=tuple(superseded), unknown=tuple(sorted(unknown)))


def armed(learned: Mapping[str, LearnedTimeout], *, configured: Mapping[str, Any], enforced: bool) -> dict[str, Armed]:
    """Return what monitors apply of these.

    Timeouts that are not enforced are only reported, and only where the user has configured none.
    """
    return {
        name: Armed(entry.timeout_s, entry.first_s, entry.limit_s, enforced)
        for name, entry in learned.items()
        if enforced or configured_s(configured, name) is None
    }


def configured_s(configured: Mapping[str, Any], name: str) -> float | None:
    """Return the user's timeout of a section, or of OUT_OF_SECTION; None is infinite, or not set."""
    timeouts = {**(configured.get(SECTIONS_FIELD) or {}), OUT_OF_SECTION: configured.get(OUT_FIELD)}
    timeout_s: float | None = timeouts.get(name)
    return timeout_s


def state_after(
    state: LearnedState,
    learned: Learned,
    *,
    configured: Mapping[str, Any],
    world_size: int | None,
    written_at_unix_s: float,
) -> LearnedState:
    """Return what to write to the file after a survey.

    Timeouts superseded by a changed configuration are dropped: the file says that it was written under this one.
    """
    choice = choose(state, configured=configured)
    sections = {**choice.learned, **learned.timeouts}
    return LearnedState(
        out_of_section=sections.pop(OUT_OF_SECTION, None),
        sections=sections,
        heartbeats=choice.heartbeats,
        configured={key: configured[key] for key in CONFIGURED_FIELDS if key in configured},
        written_at_unix_s=written_at_unix_s,
        world_size=world_size,
        known={**state.known, **learned.known},
    )


def state_after_kill(
    state: LearnedState, name: str, *, factor: float, rule: str, configured: Mapping[str, Any]
) -> LearnedState:
    """Return the state in which the timeout of this name, which has ended a rank, is doubled."""
    entry, cap_s = state.timeouts.get(name), configured_s(configured, name)
    before_s = None if entry is None else entry.timeout_s
    known = after_kill(state.known.get(name, Known(reference_s=before_s)))
    state = replace(state, known={**state.known, name: known})
    doubled = learn(known, Sketch(), factor=factor, rule=rule, cap_s=cap_s, previous_s=before_s)
    if entry is None or doubled is None:
        return state
    doubled = replace(doubled, max_observed_s=entry.max_observed_s, rank_of_max=entry.rank_of_max)
    if name == OUT_OF_SECTION:
        return replace(state, out_of_section=doubled)
    return replace(state, sections={**state.sections, name: doubled})


def from_timeout(timeout_s: float) -> LearnedTimeout:
    """Return a learned timeout of which nothing else is known."""
    return LearnedTimeout(timeout_s=timeout_s, first_s=timeout_s, limit_s=min(LIMIT * timeout_s, MAX_SECONDS))


def client_state_of(
    learned: Mapping[str, float], heartbeats: tuple[float, float] | None, configured: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the state of a client that has learned these; with ``configured``, the user's other timeouts too."""
    then = configured or {}
    sections = {name: timeout_s for name, timeout_s in learned.items() if name != OUT_OF_SECTION}
    return state_to_dict(
        None if heartbeats is None else HeartbeatTimeouts(*heartbeats, True),
        SectionTimeouts(
            {**(then.get(SECTIONS_FIELD) or {}), **sections},
            learned.get(OUT_OF_SECTION, then.get(OUT_FIELD)),
            set(sections),
            OUT_OF_SECTION in learned,
        ),
        with_configured=configured is not None,
    )


def _floored(entry: LearnedTimeout) -> LearnedTimeout:
    timeout_s = max(entry.timeout_s, LEARNED_FLOOR_S)
    return replace(
        entry,
        timeout_s=timeout_s,
        first_s=max(entry.first_s, timeout_s),
        limit_s=max(entry.limit_s, entry.first_s, timeout_s),
    )


def from_client(
    client_state: Mapping[str, Any], *, configured: Mapping[str, Any], written_at_unix_s: float, world_size: int
) -> LearnedState:
    """Return what to write to the file after a client of a rank has calculated timeouts itself.

    ``client_state``: ``RankMonitorClient.state_dict()``. ``configured``: see :func:`choose`.
    """
    calculated = state_from_dict(client_state)
    out = calculated.out_of_section
    return LearnedState(
        sections={name: from_timeout(timeout_s) for name, timeout_s in sorted(calculated.sections.items())},
        out_of_section=None if out is None else from_timeout(out),
        heartbeats=calculated.heartbeats,
        configured={key: configured[key] for key in CONFIGURED_FIELDS if key in configured},
        written_at_unix_s=written_at_unix_s,
        world_size=world_size,
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Timeouts to learn now, and one line for each that isn't learned."""

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
        sections.append(SETUP)
    if has_seen_enough_steps:
        sections.append(STEP)
    else:
        reasons.append("the timeout of 'step' isn't learned before more training iterations were seen")
    if not has_saved:
        reasons.append("the timeout of 'checkpointing' is learned after a save")
    elif is_async_save:
        reasons.append("the timeout of 'checkpointing' isn't learned with asynchronous saves")
    else:
        sections.append(CHECKPOINTING)
    out_of_section = is_closing and has_saved and SETUP in sections and STEP in sections
    if is_closing and not out_of_section:
        reasons.append("the out-of-section timeout isn't learned: that takes a load, enough iterations and a save")
    return Update(sections=tuple(sections), out_of_section=out_of_section, reasons=tuple(reasons))
