"""Requests of ranks and `megatron-ft` to a launcher, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_ft.core.codec import Vocabulary
from megatron_ft.core.control import WorkloadControl
from megatron_ft.core.status.job_facts import JobFacts


@dataclass(frozen=True, slots=True)
class PauseDetection:
    """Suspend hang detection on this node."""

    NAME: ClassVar[str] = "pause"


@dataclass(frozen=True, slots=True)
class ResumeDetection:
    """Resume hang detection."""

    NAME: ClassVar[str] = "resume"


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the state of the job. The answer is a `JobFacts`."""


Request = WorkloadControl | PauseDetection | ResumeDetection | Status
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
