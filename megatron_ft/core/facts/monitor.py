"""Records of a rank's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_ft.core.codec import Count, Cycle, Form, IntList, Moment, Pid, Rank, Seconds
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

_LONGEST_PATH = 4096
"""PATH_MAX of Linux."""


def _path(value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST_PATH or "\0" in value:
        raise ProtocolError(shown(value))
    return value


StatePath = Annotated[str, Form(_path, lambda path: path, "list of whole numbers")]
"""Path of a file of learned timeouts, as a rank names it; "": none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A rank has connected: it is watched from now on.

    Args:
        at_ns: when.
        user_code_ns: when its script began, if that is known.
        has_group: it had set its process group up before.
        watch_only: its script calls no hooks (so far): only its collectives are watched. That isn't logged.
        state_path: file of learned timeouts; "": there is none.
        learns: the script asks for learned timeouts (calc_ft_timeouts).
    """

    rank: Rank
    cycle: Cycle
    pid: Pid
    at_ns: Moment | None = None
    user_code_ns: Moment | None = None
    has_group: bool = False
    watch_only: bool = False
    state_path: StatePath = ""
    learns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """A rank has ended its monitoring; its process still runs.

    Args:
        at_ns: when.
    """

    rank: Rank
    cycle: Cycle
    pid: Pid | None = None
    at_ns: Moment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The timeouts that are in force from now on, null where there is none.

    Args:
        version: counts the changes.
        initial_heartbeat, heartbeat: until the first heartbeat, and between two.
        sections: by name.
        out_of_section: while no section is open.
    """

    rank: Rank
    cycle: Cycle
    version: Count = 0
    initial_heartbeat: Seconds | None = None
    heartbeat: Seconds | None = None
    sections: Mapping[str, Seconds | None] = field(default_factory=dict)
    out_of_section: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstIteration:
    """A rank has begun its first iteration of the cycle.

    Args:
        iteration: its number.
        at_ns: when it began.
    """

    rank: Rank
    cycle: Cycle
    iteration: int
    at_ns: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """A rank is through its first iteration of the cycle.

    Args:
        began_ns, at_ns: when that iteration began, and when it was over.
    """

    rank: Rank
    cycle: Cycle
    at_ns: Moment
    began_ns: Moment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a rank did since the last of these records: its section events, oldest first.

    Args:
        names: of the sections, by index.
        from_ns: where the first event's ``dt_us`` counts from.
        dt_us: of each event, microseconds since the one before it.
        code: of each event, 256 * kind + index of the section; kinds are 1: opened, 2: closed, 3: heartbeat, 4: an
            iteration begins.
        iterations: the numbers of the iterations that begin, in order.
        lost: events that were overwritten before they could be read.
    """

    rank: Rank
    cycle: Cycle
    names: tuple[str, ...]
    from_ns: Moment
    dt_us: IntList
    code: IntList
    iterations: IntList
    lost: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """A rank's process has ended; the rest is what its progress board said last.

    Args:
        iteration: done by then.
        open_sections: their names, the outermost first.
        last_transition_ns: its last section event.
        shut_down: it had ended its monitoring.
    """

    rank: Rank
    cycle: Cycle
    pid: Pid | None = None
    iteration: int | None = None
    open_sections: tuple[str, ...] = ()
    last_transition_ns: Moment | None = None
    shut_down: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """A hung rank was sent a signal.

    Args:
        signal: its name.
        at_ns: when.
    """

    rank: Rank
    cycle: Cycle
    signal: str
    pid: Pid | None = None
    at_ns: Moment | None = None


@dataclass(frozen=True, slots=True)
class LauncherGone:
    """The launcher has died: this monitor ends what is left of its rank, and itself."""


Record = Attached | Detached | Timeouts | FirstIteration | FirstStep | Progress | RankGone | Signalled | LauncherGone
