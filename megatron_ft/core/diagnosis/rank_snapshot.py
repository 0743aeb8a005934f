"""What is known of one rank of a job that hangs: short enough to be sent to the launcher that decides. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from megatron_ft.core.codec import Count, Form, LocalRank, Rank, Seconds, fields, unpack
from megatron_ft.core.diagnosis.stacks import Frame
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.signals import signal_name
from megatron_ft.core.wording import shown

__all__ = [
    "EVIDENCE_S",
    "Collective",
    "RankSnapshot",
    "is_in_checkpoint_write",
    "is_in_library",
    "is_past_its_script",
    "is_waiting_for_process",
    "lost_process",
    "packed",
    "place",
    "stack_wait",
    "unpacked",
]

EVIDENCE_S = 2.0
"""How long, in seconds, evidence is collected at most: the monitor that found the hang and the launcher must agree."""
_PEER = re.compile(r"^(?:send|recv) (\d+)\s*(?:->|<-)\s*(\d+)$")
_NEAR = 10
"""In so many innermost calls is searched for what a thread waits in."""
_MOST_RANKS = 1 << 20
_MOST_CHARACTERS = 1000
_C10D = "torch/distributed/distributed_c10d.py"
_PROCESSES = ("/multiprocessing/", "/concurrent/futures/process.py", "/subprocess.py")
_CHECKPOINTS = ("/dist_checkpointing/", "torch/distributed/checkpoint/")


def packed(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """A group for JSON: those of thousands of ranks are nearly always evenly spaced."""
    spaced = _spaced(ranks)
    return list(ranks) if spaced is None else {"range": [spaced.start, spaced.stop, spaced.step]}


def unpacked(ranks: Any) -> Sequence[int]:
    """The other way: a ``range`` where it can be, which takes no room however large the group is.

    Raises:
        ProtocolError: it is none.
    """
    try:
        found = range(*ranks["range"]) if isinstance(ranks, Mapping) else tuple(ranks)
        ends = (found[0], found[-1]) if found and isinstance(found, range) else found
    except (KeyError, OverflowError, TypeError, ValueError):
        raise ProtocolError(shown(ranks)) from None
    if not all(type(each) is int and 0 <= each < _MOST_RANKS for each in ends):
        raise ProtocolError(shown(ranks))
    return found


def _spaced(ranks: Sequence[int]) -> range | None:
    if isinstance(ranks, range):
        return ranks
    if len(ranks) <= 2:
        return None
    found = range(ranks[0], ranks[-1] + 1, (ranks[1] - ranks[0]) or 1)
    return found if len(found) == len(ranks) and all(map(int.__eq__, ranks, found)) else None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One that a rank has entered and not left.

    Args:
        group: torch's name of its process group, the same on all its ranks.
        seq: its number in that group, from 1; for a point-to-point operation among those of the pair.
        op: "all_reduce"; for a point-to-point operation "recv 0<-1", with ranks of the group.
        ranks: the global ranks of the group, as a ``range`` where they are evenly spaced, else a tuple.
    """

    group: str
    seq: Count
    op: str
    ranks: Annotated[Sequence[int], Form(unpacked, packed)] = ()
    p2p: bool = False
    description: str = ""
    backend: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _spaced(self.ranks) or tuple(self.ranks))

    @property
    def key(self) -> str:
        """Names the counter that ``seq`` is of: a group may have one for each of two backends."""
        return f"{self.backend}/{self.group}"

    @property
    def peer(self) -> int | None:
        """The global rank on the other side of a point-to-point operation, if the operation names it."""
        found = _PEER.match(self.op)
        if found is None:
            return None
        index = int(found[2])
        return self.ranks[index] if index < len(self.ranks) else None

    @property
    def name(self) -> str:
        """For people: "all_reduce #412 of group tp"."""
        group = self.description or self.group
        return f"{self.op} #{self.seq}" + ("" if group in ("", "0", "default_pg") else f" of group {group}")


def _write_in_flight(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """The ranks of a group are written once, however many of its collectives are in flight."""
    found, told = [], set()
    for each in collectives:
        found.append(fields(each if each.group not in told else replace(each, ranks=())))
        told.add(each.group)
    return found


def _read_in_flight(value: Any) -> tuple[Collective, ...]:
    if not isinstance(value, list):
        raise ProtocolError(shown(value))
    found = [unpack(Collective, each) for each in value]
    groups: dict[str, Sequence[int]] = {}
    return tuple(replace(each, ranks=groups.setdefault(each.group, each.ranks)) for each in found)


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """The evidence on one rank, at the moment at which a rank was found hung.

    Args:
        section: the outermost one that is open; open_s: for how long it is, or how long none is open.
        quiet_s: seconds since its last section event.
        left_s: seconds until the first of its timeouts is over, negative if one is; None if none runs.
        found_hung: its own monitor found it overdue.
        state: of its process as /proc has it: "R", "S", "D", "T"; empty where that isn't known.
        is_busy: its main thread used its processor while evidence was collected.
        has_stack: a stack was collected; frame and inner are of its main thread.
        frame: the innermost call in the user's code, "loader.py:88 next_batch"; inner: the innermost at all.
        waits_in: the collective that its stack shows it in, empty if none.
        has_collectives: it told its collectives; a rank that holds the GIL can't.
        is_in_library: its innermost call is in torch or Megatron, where it may wait in C.
        timeout_s: of the outermost open section, or out of section; None is none.
        enqueued: "backend/group" -> number of the last collective it has entered.
        closing: it had ended its monitoring; gone: its process had ended.
        raised: the exception that it ends of, "type: message", its first 1,000 characters; that may take it long, or
            for ever.
        raised_s: seconds since then.
        lost: its processes that have ended badly, and that it hasn't asked after, as ``lost_process`` has them.
        waits_for_process: its stack is where Python waits for a process, or for what one sends.
        collective_s: where its script calls no hooks: seconds since it was seen to begin or complete a collective.
    """

    rank: Rank
    local_rank: LocalRank = 0
    host: str = ""
    pid: Count = 0
    iteration: int | None = None
    section: str | None = None
    open_s: Seconds = 0.0
    quiet_s: Seconds = 0.0
    found_hung: bool = False
    state: str = ""
    is_busy: bool = False
    has_stack: bool = False
    frame: str = ""
    inner: str = ""
    waits_in: str = ""
    is_saving: bool = False
    is_in_library: bool = False
    timeout_s: Seconds | None = None
    has_collectives: bool = False
    in_flight: Annotated[tuple[Collective, ...], Form(_read_in_flight, _write_in_flight)] = ()
    enqueued: Mapping[str, Count] = field(default_factory=dict)
    closing: bool = False
    gone: bool = False
    raised: str = ""
    raised_s: Seconds = 0.0
    left_s: float | None = None
    lost: tuple[str, ...] = ()
    waits_for_process: bool = False
    collective_s: Seconds | None = None

    def __post_init__(self) -> None:
        if len(self.raised) > _MOST_CHARACTERS:  # a message has room for a MiB, and some exceptions are longer
            object.__setattr__(self, "raised", self.raised[:_MOST_CHARACTERS])

    @property
    def is_stopped(self) -> bool:
        """By a signal, or by a debugger."""
        return self.state in ("T", "t")

    @property
    def seems_to_wait(self) -> bool:
        """Its stack is in a collective, or idle somewhere in torch or Megatron, as in `request.wait()` of a pipeline.

        Gloo's point-to-point operations aren't in torch's flight recorder.
        """
        return bool(self.waits_in) or (self.is_in_library and not (self.is_busy or self.is_saving))

    @property
    def is_stuck_in_kernel(self) -> bool:
        """In uninterruptible sleep: a dead file server, a driver."""
        return self.state == "D"


def is_in_library(frames: Sequence[Frame]) -> bool:
    """Whether the innermost call of a stack is torch's or Megatron's, which may wait in C."""
    return bool(frames) and any(part in frames[0].file for part in ("/torch/", "/megatron/"))


def stack_wait(frames: Sequence[Frame]) -> str:
    """The collective that a stack (innermost call first) is in: "all_reduce"; empty if it is in none."""
    for frame in frames[:_NEAR]:
        if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
            return frame.function
    return ""


def is_past_its_script(frames: Sequence[Frame]) -> bool:
    """Whether a main thread's stack is where Python waits for other threads, at the end of the process."""
    return any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in frames)


def is_waiting_for_process(frames: Sequence[Frame]) -> bool:
    """Whether a stack (innermost call first) is where Python waits for another process, or for what one sends."""
    return any(part in frame.file for frame in frames[:_NEAR] for part in _PROCESSES)


def lost_process(pid: int, name: str, exitcode: int) -> str:
    """A process that ended badly, in words; ``exitcode`` as ``subprocess`` has it."""
    how = f"exited with code {exitcode}" if exitcode >= 0 else f"was killed by {signal_name(-exitcode)}"
    return f"process {pid} ({name}), which {how}"


def is_in_checkpoint_write(frames: Sequence[Frame]) -> bool:
    """Whether a stack is in one of torch's or Megatron's checkpoint writers."""
    return any(
        any(part in frame.file for part in _CHECKPOINTS)
        or (frame.file.endswith("torch/serialization.py") and frame.function == "save")
        for frame in frames
    )


def place(note: RankSnapshot) -> str:
    """Where a rank is, in words: "in loader.py:88 next_batch", and which processes it has lost."""
    if not note.lost or note.gone:
        return _place(note)
    more = f", and {len(note.lost) - 1} more" if len(note.lost) > 1 else ""
    return _joined(f"{'waits for' if note.waits_for_process else 'has lost'} its {note.lost[0]}{more}", _place(note))


def _place(note: RankSnapshot) -> str:
    where = f"in {note.frame}" if note.frame else ""
    if note.inner and note.inner != note.frame:
        where += f" ({note.inner})"
    if note.gone:
        return (note.raised and where) or "has ended"
    if note.raised:
        return _joined("has not exited", where)
    if note.is_stopped:
        return (where if note.has_stack else f"last seen {where}") if where else "its process is stopped"
    if note.is_stuck_in_kernel:
        return _joined("in uninterruptible sleep", where)
    if note.in_flight:
        return _joined(f"in {note.in_flight[0].name}", where)
    if note.waits_in:
        return _joined(f"in {note.waits_in}", where)
    if note.is_saving:
        return _joined("in a checkpoint write", where)
    if note.closing:
        return _joined("has ended its training", where)
    if not note.has_stack:
        return "no stack could be collected"
    if not note.has_collectives:
        return _joined(where, "holding the GIL")
    return _joined(where, "computing") if note.is_busy else where


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
