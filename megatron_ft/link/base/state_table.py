"""State machines as tables: (state, event) -> next state. Checked when imported. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)
unlisted: Callable[[str], object] = str


def check(transitions: Mapping[tuple[State, Event], State], *, first: State, last: State) -> None:
    """Check that every state can be reached from ``first``, that only ``last`` has no next, and no event is unused.

    Raises:
        ValueError: the table is wrong.
    """
    reached, news = {first}, {first}
    while news:
        news = {after for (before, _), after in transitions.items() if before in news} - reached
        reached |= news
    ends = set(type(first)) - {before for before, _ in transitions}
    if reached != set(type(first)) or ends != {last}:
        raise ValueError(f"never reached: {set(type(first)) - reached}; last: {ends}")
    events = type(next(event for _, event in transitions))
    if unused := set(events) - {event for _, event in transitions}:
        raise ValueError(f"events that move nothing: {unused}")


def follow(transitions: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """Return the next state. An event that isn't listed for this state changes nothing, and is reported."""
    after = transitions.get((state, event))
    if after is None:
        unlisted(f"{type(state).__name__} {state.name} has no transition for {event.name}")
        return state
    return after


def report_unlisted(report: Callable[[str], object]) -> None:
    """Have events that no table lists reported: a process writes them at DEBUG, a test raises."""
    global unlisted
    unlisted = report
