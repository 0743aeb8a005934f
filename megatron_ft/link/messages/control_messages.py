"""Requests of ranks and `megatron-ft` to a launcher, and its answers."""

from __future__ import annotations

from megatron_ft.link.base.codec import Message, Vocabulary
from megatron_ft.link.base.control import WorkloadControl
from megatron_ft.link.messages.job_facts import JobFacts
from megatron_ft.link.messages.monitor_messages import Pause, Resume


class Status(Message, frozen=True):
    """Ask for the state of the job. The answer is a `JobFacts`."""


Request = WorkloadControl | Pause | Resume | Status
REQUESTS: Vocabulary[Request] = Vocabulary(Request)


class Ok(Message, frozen=True):
    """The request was accepted, or the order obeyed. ``changed``: it had an effect."""

    changed: bool = True


Answer = Ok | JobFacts
ANSWERS: Vocabulary[Answer] = Vocabulary(Answer)
