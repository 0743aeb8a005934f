"""What a launcher knows of its job on this node, as it answers `megatron-ft status`. Pure.

The boards say where each rank is; this says everything else. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_ft.core.board.pauses import Pauses
from megatron_ft.core.errors import ProtocolError

__all__ = ["JobFacts", "LastCause", "Phase", "RankFacts"]


class Phase(enum.Enum):
    """What the launcher is about."""

    STARTING = "starting"
    """No rank was made yet: the nodes meet, or modules are imported."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A cycle has ended, and the next one isn't there yet."""
    ENDING = "ending"
    """There will be no other cycle."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank of this node in the last cycle that was begun."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    """None while it runs; negative is the signal that ended it."""
    hung: bool
    """It was found hung, and is being ended or was."""
    board: int | None
    """The number (inode) of its board's memory; None if it hasn't begun its monitoring."""


@dataclass(frozen=True, kw_only=True)
class LastCause:
    """Why the last cycle ended that didn't end well."""

    cycle: int
    text: str
    rank: int | None
    kind: str


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The job as this node's launcher sees it."""

    run_id: str
    launcher_pid: int
    log_dir: str
    """Empty: no logs are written."""
    started_ns: int
    phase: Phase
    cycle: int | None
    cycle_started_ns: int | None
    """Of the last cycle that was begun, as ``cycle``; None before the first."""
    nodes: int
    world_size: int
    max_restarts: int
    restarts_left: int
    observe_only: bool
    paused_since_ns: int | None
    pauses: tuple[tuple[int, int], ...]
    """From when to when each pause was, the one that lasts included."""
    last_cause: LastCause | None
    ranks: tuple[RankFacts, ...]

    def to_message(self) -> dict[str, Any]:
        """For the wire; the reverse is ``from_message``."""
        return {**asdict(self), "phase": self.phase.value}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> JobFacts:
        """Read what ``to_message`` wrote; keys that aren't known are passed over.

        Raises:
            ProtocolError: something is missing, as in the answer of a launcher of another version.
        """
        try:
            known = _known(cls, message)
            cause = known["last_cause"]
            return cls(
                **{
                    **known,
                    "phase": Phase(known["phase"]),
                    "pauses": tuple((int(start), int(end)) for start, end in known["pauses"]),
                    "last_cause": None if cause is None else LastCause(**_known(LastCause, cause)),
                    "ranks": tuple(RankFacts(**_known(RankFacts, rank)) for rank in known["ranks"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the launcher's answer is of another version ({error})") from None

    def judgement_pauses(self) -> Pauses:
        """The pauses as the launcher and the monitors hold them."""
        pauses = Pauses()
        for start_ns, end_ns in self.pauses:
            pauses.begin(start_ns)
            if start_ns != self.paused_since_ns:
                pauses.end(end_ns)
        return pauses


def _known(kind: type, message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, all of them; what a newer launcher says beside them is passed over."""
    return {field.name: message[field.name] for field in fields(kind)}
