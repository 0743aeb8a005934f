"""Requests of ranks and `megatron-ft` to a launcher, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from megatron_ft.core.codec import Form, Vocabulary
from megatron_ft.core.control import WorkloadAction
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.status.job_facts import JobFacts
from megatron_ft.core.wording import shown

_MAX_RANK = 10**7


def _action(name: Any) -> WorkloadAction:
    if type(name) is not str or name not in WorkloadAction.__members__:
        raise ProtocolError(shown(name))
    return WorkloadAction[name]


def _rank_or_none(rank: Any) -> int | None:
    return rank if type(rank) is int and 0 <= rank <= _MAX_RANK else None


@dataclass(frozen=True, slots=True)
class WorkloadControl:
    """A rank's request; ``rank`` is only logged, so a wrong one does no harm."""

    action: Annotated[WorkloadAction, Form(_action, lambda action: action.name)]
    description: str = ""
    rank: Annotated[int | None, Form(_rank_or_none, lambda rank: rank)] = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Suspend hang detection on this node."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume hang detection."""


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the state of the job. The answer is a `JobFacts`."""


Request = WorkloadControl | Pause | Resume | Status
REQUESTS: Vocabulary[Request] = Vocabulary(Request)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was accepted."""


@dataclass(frozen=True, slots=True)
class Ok:
    """The order was obeyed. ``changed``: it had an effect."""

    changed: bool = True


Answer = Accepted | Ok | JobFacts
ANSWERS: Vocabulary[Answer] = Vocabulary(Answer)
