"""Moves learned timeouts between a client and ``ft_state.json``, and does all that needs private parts of a client.

A client may be any object with the public methods of :class:`RankMonitorClient`; for one that isn't ours the
file holds its plain ``state_dict()``, and nothing is looked up inside it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.records import rank as records
from megatron_ft.core.records.all_kinds import Record
from megatron_ft.core.timeouts import learned
from megatron_ft.core.timeouts.ft_state_document import parse, to_document
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, state_to_dict
from megatron_ft.core.timeouts.learned import LearnedState, seconds
from megatron_ft.core.timeouts.over_all_ranks import Calculation
from megatron_ft.ipc.files.state_file import BrokenStateFile, read_state, set_aside, write_state
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.client import RankMonitorClient

_NOTHING_IS_CONFIGURED = (
    "no timeout is configured: they are learned from this run, and until then no rank is terminated as hung "
    "(with learn_timeouts: off none is learned)"
)
_FIRST_STEPS = 32
_LAYOUT = {
    "tensor": "get_tensor_model_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "data": "get_data_parallel_world_size",
}


@dataclass(kw_only=True)
class Loaded:
    """The result of :func:`load`: lines for rank 0 to print."""

    infos: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def ours(client: Any) -> RankMonitorClient | None:
    """The client if it is of this package, so that its private parts may be used."""
    return client if isinstance(client, RankMonitorClient) else None


def prepare(client: Any, sections: Iterable[str]) -> list[str]:
    """After init: the floor of learned timeouts, and the sections that must exist; returns the added ones."""
    mine = ours(client)
    if mine is None:
        return []
    mine._learn_by_config()
    return list(mine._add_sections(list(sections)))


def log_event(client: Any, record: Record) -> None:
    """Append to the event log of this rank, if there is one, and wait for it: a fault may end the rank now."""
    mine = ours(client)
    if mine is not None:
        mine._log.write(record)
        mine._log.flush()


def current_iteration(client: Any) -> int | None:
    """The iteration that this rank reported last, if it did. Any thread may ask."""
    recorder = getattr(ours(client), "_recorder", None)
    return recorder._last_iteration if recorder is not None and recorder._last_iteration >= 0 else None


def load(client: Any, path: str) -> Loaded:
    """Load what the file holds into the client, the same on all ranks.

    With a process group this is a collective: rank 0 reads and tells the others, so that no two ranks can see
    different files. A broken file is set aside by rank 0, and nothing is loaded.

    Raises:
        RankMonitorClientError: the client refuses what was chosen.
    """
    loaded = Loaded()
    document = None
    if agreement.rank() == 0 or not agreement.has_process_group():
        document = _read(client, path, loaded)
    document = agreement.from_rank_0(document)
    if document is None:
        return loaded
    mine = ours(client)
    if mine is None:
        client.load_state_dict(document)
        loaded.infos.append(f"timeouts loaded from {path}")
        return loaded
    assert mine.cfg is not None
    assert mine.section_timeouts is not None
    state = parse(document)
    choice = learned.choose(
        state,
        configured=_configured(mine),
        known_sections=frozenset(mine.section_timeouts.section),
        floor_s=float(mine.cfg.calculated_timeout_floor),
    )
    loaded.warnings.extend(superseded.describe() for superseded in choice.superseded)
    if choice.unknown:
        loaded.warnings.append(f"learned timeouts of sections that don't exist now are ignored: {list(choice.unknown)}")
    mine._knowledge.load(state, choice.timeouts)
    mine._knowledge.agree(sorted([*mine.section_timeouts.section, OUT_OF_SECTION]))
    if not choice.is_empty:
        mine.load_state_dict(choice.client_state())
        summary = ", ".join(f"{name} {seconds(value)}" for name, value in choice.timeouts.items())
        loaded.infos.append(f"timeouts loaded from {path}: {summary or 'heartbeats'}")
        loaded.infos.extend(
            f"the timeout of '{name}' terminated a rank in the last cycle: it is multiplied by {factor:g} "
            f"until '{name}' has completed"
            for name, factor in mine._knowledge.raised.items()
            if name in choice.timeouts
        )
        difference = learned.describe_difference(state, world_size=agreement.world_size(), layout=current_layout())
        if difference is not None:
            loaded.warnings.append(f"timeouts loaded from {path}: {difference}")
    record = records.StateLoaded(
        path=path,
        timeouts=choice.timeouts,
        superseded=tuple(superseded.name for superseded in choice.superseded),
        ignored=tuple(choice.unknown),
        world_size=state.world_size,
        layout=None if state.layout is None else dict(state.layout),
    )
    mine._log.write(record)
    return loaded


def save(client: Any, path: str) -> None:
    """Write the client's calculated timeouts to the file. Only rank 0 may call this.

    Raises:
        OSError: it can't be written.
    """
    mine = ours(client)
    if mine is None:
        write_state(path, client.state_dict())
        return
    state = state_of(mine, path, layout=current_layout())
    # for nvidia-resiliency-ext, so that a user who goes back to it loses nothing; here nothing reads it
    theirs = state_to_dict(mine.hb_timeouts, mine.section_timeouts, with_configured=True)
    write_state(path, {**to_document(state), **theirs})


def state_of(client: RankMonitorClient, path: str, *, layout: Mapping[str, int] | None = None) -> LearnedState:
    """Build what ``save`` writes; the file at ``path``, if there is one, tells where timeouts that stay came from."""
    earlier: LearnedState | None = None
    with contextlib.suppress(BrokenStateFile, ConfigError):  # it only tells where older values came from
        earlier = parse(read_state(path))
    return learned.from_client(
        client.state_dict(),
        last_calculation=client._knowledge.last_calculation,
        earlier=earlier,
        configured=_configured(client),
        written_at_unix_s=time.time(),
        world_size=agreement.world_size(),
        layout=layout,
        known=client._knowledge.known,
    )


def decide_to_learn(client: Any, ft_state: Any, added: Sequence[str]) -> str:
    """Decide, after ``load``, whether a job learns without being asked: one that has no timeout configured does.

    Returns the line to print about timeouts that don't exist, empty if there is nothing to say. ``added``: the sections
    without a configured timeout.
    """
    mine = ours(client)
    ft_state.learns_by_itself = False
    if mine is not None and not ft_state.is_calculating_timeouts:
        assert mine.cfg is not None
        assert mine.section_timeouts is not None
        if mine.cfg.learn_timeouts == "auto" and not any(mine.cfg.is_set(name) for name in learned.CONFIGURED_FIELDS):
            ft_state.learns_by_itself = ft_state.is_calculating_timeouts = True
            return "" if mine.section_timeouts.calculated_sections else _NOTHING_IS_CONFIGURED
    names = ", ".join(map(repr, added))
    return f"no timeout is configured for {names}: infinite until one is learned" if added else ""


def is_time_to_learn(ft_state: Any) -> bool:
    """After 32, 64, 128, ... steps of a run, the same on all ranks: a job may save once in an hour."""
    steps = ft_state.seen_tr_iters_cnt
    return getattr(ft_state, "learns_by_itself", False) and steps >= _FIRST_STEPS and steps & (steps - 1) == 0


def log_learned(client: Any, names: Iterable[str]) -> None:
    """Append the latest calculation of these timeouts to the event log: old, new, margin, who set it.

    The margin is what the new timeout leaves above the longest interval that was seen, in seconds.
    """
    mine = ours(client)
    if mine is not None:
        timeouts = {name: _with_margin(mine._knowledge.last_calculation[name]) for name in names}
        mine._log.write(records.TimeoutsLearned(timeouts=timeouts))


def _with_margin(calculation: Calculation) -> records.LearnedTimeout:
    margin_s = calculation.timeout_s - calculation.max_observed_s
    return records.LearnedTimeout(**calculation._asdict(), margin_s=margin_s)


def describe_update(client: Any, names: Iterable[str]) -> str:
    """What the latest calculation of these timeouts has changed, in one line; empty if nothing worth a line."""
    mine = ours(client)
    if mine is None:
        return f"timeouts updated: {', '.join(names)}"
    calculations = {name: mine._knowledge.last_calculation[name] for name in names}
    changes = [_describe_change(name, c) for name, c in calculations.items() if _is_worth_a_line(c)]
    return f"timeouts updated: {'; '.join(changes)}" if changes else ""


def _is_worth_a_line(calculation: Calculation) -> bool:
    previous_s = calculation.previous_s
    return previous_s is None or abs(calculation.timeout_s - previous_s) > 0.01 * previous_s


def _describe_change(name: str, calculation: Calculation) -> str:
    return (
        f"{name} {seconds(calculation.timeout_s)} (was {seconds(calculation.previous_s)}; "
        f"the longest took {seconds(calculation.max_observed_s)}, in rank {calculation.rank_of_max})"
    )


def _read(client: Any, path: str, loaded: Loaded) -> Any | None:
    """The document, or None; puts a broken file out of the way and says so (rank 0)."""
    try:
        document = read_state(path)
        if document is not None and ours(client) is not None:
            parse(document)
        elif document is not None and not isinstance(document, dict):
            raise BrokenStateFile(f"holds {type(document).__name__}, not a mapping")
        return document
    except (BrokenStateFile, ConfigError) as error:
        if agreement.rank() == 0:
            loaded.warnings.append(f"{path} {error}; {_put_away(path)}. Continuing with the configured timeouts")
        return None


def _put_away(path: str) -> str:
    try:
        return f"set aside as {set_aside(path)}"
    except OSError as error:
        return f"it could not be set aside ({error.strerror})"


def current_layout() -> dict[str, int] | None:
    """Sizes of megatron-core's parallel groups by kind ("tensor": 2); None while they don't exist.

    It is looked up, never imported.
    """
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    try:
        if parallel_state is None or not parallel_state.model_parallel_is_initialized():
            return None
        return {kind: int(getattr(parallel_state, function)()) for kind, function in _LAYOUT.items()}
    except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError):
        return None  # a version that names or divides them otherwise; the layout is only told, nothing hangs on it


def _configured(client: RankMonitorClient) -> dict[str, Any]:
    """The timeouts that the user set."""
    assert client.cfg is not None
    values = client.cfg.to_dict()
    return {name: values[name] for name in learned.CONFIGURED_FIELDS if name in values}
