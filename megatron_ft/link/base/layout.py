"""The progress board: meaning of each word, and one reading of all.

A board is an array of unsigned 64-bit words that one rank and its monitor map. Times are nanoseconds of
CLOCK_MONOTONIC, 0 is "never". Each word has a meaning by itself, so a reader needs no lock: a torn or reordered read
between two words can delay a verdict, never cause one (a verdict is read twice).

Writers: the rank writes everything but the words marked (monitor) or (launcher). The monitor fills a fresh board before
the rank maps it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAGIC = 0x4D46545F424F000B
"""'MFT_BO' and the layout's version: a board of another version isn't read."""
DAMAGED = int.from_bytes(b"damaged!", "little")
"""Magic word of a board on which a monitor has found damage, so that no other process reads it either."""
WORD_MASK = 2**64 - 1
NO_TIMEOUT = WORD_MASK

# words that `BoardSnapshot` has as they are, in its order
W_MAGIC, W_CYCLE, W_START, W_RANK, W_PID, W_WARMUP_ITERATIONS, W_STACK_SIGNAL, W_MAIN_THREAD = range(8)
W_ITERATIONS_SEEN, W_ITERATIONS_BACK, W_FIRST_ITERATION_AT, W_FIRST_STEP_AT, W_WARM_UP_OVER_AT = range(8, 13)
W_HEARTBEATS, W_LAST_HEARTBEAT, W_LAST_TRANSITION, W_LAST_LOOK, W_RING_HEAD = range(13, 18)
W_TIMEOUTS_VERSION, W_HEARTBEAT_FLAGS, W_LEARNING_FACTS, W_STEPS, W_SAVES = range(18, 23)
_PLAIN = slice(W_CYCLE, W_SAVES + 1)
# iterations: the number + 1, 0 is unknown; closing: CLOSING once the rank has ended its monitoring; next look of the
# monitor at the latest; (launcher) STATE_ values: what became of the last timeouts that were to be written
W_ITERATION, W_FIRST_ITERATION, W_CLOSING, W_WATCH_ONLY, W_SECTION_COUNT, W_NEXT_LOOK, W_STATE_WRITTEN = range(23, 30)
W_INITIAL_HEARTBEAT_TIMEOUT, W_HEARTBEAT_TIMEOUT, W_OUT_OF_SECTION_TIMEOUT, W_OUT_OF_SECTION_CALCULATED = range(30, 34)
# (monitor) learned timeouts that apply instead of the rank's own words, 0: none; flags follow the last one
W_INITIAL_HEARTBEAT_ARMED, W_HEARTBEAT_ARMED, W_OUT_OF_SECTION_ARMED = range(34, 37)
# in the order of `CollectiveCounts`
W_COLLECTIVES_SEEN_AT, W_COLLECTIVE_AT, W_COLLECTIVES_ENTERED, W_COLLECTIVES_COMPLETED = range(38, 42)
W_GROUP_TIMEOUT, W_LOOKS, W_LOOKS_WAITING, W_WAITS = range(42, 46)

MOST_COUNT = 2**48
"""Upper bound of every count."""
CLOSING = int.from_bytes(b"is over!", "little")
"""Value that no stray write makes: it is believed on a damaged board, too."""
FLAG_ARE_LEARNED = 4

FACT_LEARNS = 1
"""Fact: the script asks for learned timeouts (calc_ft_timeouts)."""
FACT_HOOKS = 2
"""Fact: the hooks of a train loop are in use."""
FACT_LOADED = 4
"""Fact: a persistent checkpoint was loaded."""
FACT_ENOUGH_STEPS = 8
"""Fact: enough training steps were made for the longest to be typical."""
FACT_ASYNC_SAVES = 16
FACT_RUN_ENDS = 32
"""Fact: the rank is about to end its monitoring, at the end of its run."""
STATE_WRITTEN, STATE_NOT_WRITTEN = 1, 2
ARMED_ENFORCED = 1
"""Flag: a rank that exceeds the armed timeout may be terminated; without it, the rank is only reported."""

SECTION_TABLE = 56
SECTION_WORDS = 16
MAX_SECTIONS = 64 + 8  # as many as may be configured, and those that our hooks add
NAME_BYTES = 64
S_OPENED_AT = 8  # after the 8 words of the name
S_OPEN_COUNT = 9
S_TIMEOUT = 10
S_CALCULATED = 11  # 1: the rank's client has calculated it from observed intervals
S_ARMED = 12  # (monitor) as W_OUT_OF_SECTION_ARMED, and the flags after it

RING = SECTION_TABLE + SECTION_WORDS * MAX_SECTIONS
RING_EVENTS = 4096  # a power of two
RING_MASK = RING_EVENTS - 1
PLACE = RING + 2 * RING_EVENTS  # where in the user's code a rank that calls no hooks was seen last, a text
PLACE_WORDS = 32
BOARD_WORDS = PLACE + PLACE_WORDS
BOARD_BYTES = 8 * BOARD_WORDS

# an event is (time, kind << 56 | section index << 48 | value)
EVENT_START = 1
EVENT_END = 2
EVENT_HEARTBEAT = 3
EVENT_ITERATION = 4
KIND_SHIFT = 56
SECTION_SHIFT = 48
VALUE_MASK = (1 << SECTION_SHIFT) - 1

_TABLE_FORMAT = struct.Struct(f"={RING}Q")


def ring_events(words: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield time, kind, index of the section and value of each event; ``words``: two for each."""
    for at_ns, code in zip(words[::2], words[1::2], strict=True):
        yield at_ns, code >> KIND_SHIFT, code >> SECTION_SHIFT & 0xFF, code & VALUE_MASK


def slot(index: int) -> int:
    """Return the first word of the section with this index."""
    return SECTION_TABLE + SECTION_WORDS * index


class ArmedTimeout(NamedTuple):
    """Learned timeout that the monitor applies instead of the rank's own one."""

    timeout_ns: int
    enforced: bool = True
    """False: a rank that exceeds the timeout is only reported."""


class SectionView(NamedTuple):
    """One section on the board."""

    name: str
    opened_at_ns: int
    open_count: int
    own_timeout_ns: int | None
    """Timeout written by the rank."""
    is_calculated: bool = False
    """True if the rank's client has calculated its own timeout from observed intervals."""
    armed: ArmedTimeout | None = None

    @property
    def timeout_ns(self) -> int | None:
        """Timeout in force."""
        return self.own_timeout_ns if self.armed is None else self.armed.timeout_ns


class CollectiveCounts(NamedTuple):
    """Counts over all process groups of a rank, as its watch has read them from torch, with times as on the board."""

    seen_ns: int
    """Time of the reading."""
    moved_ns: int
    """Time at which a count was seen to change, or a new group was first seen."""
    entered: int
    completed: int
    group_timeout_ns: int | None = None
    """Timeout of the default process group; None if unknown."""
    looks: int = 0
    """Number of readings so far."""
    waiting: int = 0
    """Readings that found the rank in a collective."""
    waits: int = 0
    """Readings that found it in one, after one that hadn't."""


class BoardSnapshot(NamedTuple):
    """One reading of a board. Times are CLOCK_MONOTONIC nanoseconds, 0 is never; None is no timeout."""

    cycle: int = 0
    start_ns: int = 0
    """(monitor) Start of monitoring."""
    rank: int = 0
    pid: int = 0
    warmup_iterations: int = 0
    stack_signal: int = 0
    """Signal that makes this rank write its stacks; 0: none."""
    main_thread: int = 0
    """threading.get_ident() of its main thread."""
    iterations_seen: int = 0
    iterations_back: int = 0
    """How often the iteration number went down: it is no measure of progress then."""
    first_iteration_at_ns: int = 0
    first_step_at_ns: int = 0
    """When the second iteration or "step" began, and the first was over."""
    warm_up_over_ns: int = 0
    """When the first iteration after those of the warm-up began."""
    heartbeats: int = 0
    last_heartbeat_ns: int = 0
    last_transition_ns: int = 0
    """Time of the last section event."""
    last_look_ns: int = 0
    """(monitor)"""
    ring_head: int = 0
    timeouts_version: int = 0
    heartbeat_flags: int = 0
    learning_facts: int = 0
    """FACT_ bits."""
    steps: int = 0
    """Training steps that have ended."""
    saves: int = 0
    """Persistent saves that have ended."""
    # the fields above are words, in their order
    iteration: int | None = None
    first_iteration: int | None = None
    closing: bool = False
    own_initial_heartbeat_timeout_ns: int | None = None
    own_heartbeat_timeout_ns: int | None = None
    own_out_of_section_timeout_ns: int | None = None
    is_out_of_section_calculated: bool = False
    """True if the rank's client has calculated that timeout from observed intervals."""
    armed_initial_heartbeat_ns: int | None = None
    armed_heartbeat_ns: int | None = None
    armed_out_of_section: ArmedTimeout | None = None
    sections: tuple[SectionView, ...] = ()
    watch_only: bool = False
    """(monitor) True if the script calls no hooks, and only its collectives are written here."""
    collectives: CollectiveCounts | None = None
    """Counts of collectives; None if they aren't read, or there is no process group."""

    @property
    def open_sections(self) -> tuple[SectionView, ...]:
        """Sections open now, outermost (longest open) first."""
        return tuple(sorted((s for s in self.sections if s.opened_at_ns), key=lambda s: s.opened_at_ns))

    @property
    def out_of_section_timeout_ns(self) -> int | None:
        """Timeout in force while no section is open."""
        armed = self.armed_out_of_section
        return self.own_out_of_section_timeout_ns if armed is None else armed.timeout_ns

    @property
    def initial_heartbeat_timeout_ns(self) -> int | None:
        """Timeout in force until the first heartbeat."""
        return self.armed_initial_heartbeat_ns or self.own_initial_heartbeat_timeout_ns

    @property
    def heartbeat_timeout_ns(self) -> int | None:
        """Timeout in force between two heartbeats."""
        return self.armed_heartbeat_ns or self.own_heartbeat_timeout_ns


def is_through_its_start(board: BoardSnapshot) -> bool:
    """Return True if the rank has begun an iteration, sent a heartbeat, or ended a section."""
    ended = any(each.open_count > 1 or (each.open_count and not each.opened_at_ns) for each in board.sections)
    return board.iteration is not None or board.heartbeats > 0 or ended


class BoardDamagedError(Exception):
    """Raised for a word that its writer can't have written; the text names it."""


_NAMES = {number: name for name, number in [*globals().items()] if name.startswith("W_")}
_STAMPS = (
    *(W_FIRST_ITERATION_AT, W_FIRST_STEP_AT, W_WARM_UP_OVER_AT, W_LAST_HEARTBEAT, W_LAST_TRANSITION, W_LAST_LOOK),
    *(W_COLLECTIVES_SEEN_AT, W_COLLECTIVE_AT),
)
_COUNTS = (
    *(W_ITERATIONS_SEEN, W_ITERATIONS_BACK, W_WARMUP_ITERATIONS, W_HEARTBEATS, W_RING_HEAD, W_TIMEOUTS_VERSION),
    *(W_STEPS, W_SAVES, W_LOOKS, W_LOOKS_WAITING, W_WAITS),
)
_MOST = dict.fromkeys(_COUNTS, MOST_COUNT) | {W_SECTION_COUNT: MAX_SECTIONS, W_LEARNING_FACTS: 2 * FACT_RUN_ENDS - 1}
_TIMEOUTS = (W_INITIAL_HEARTBEAT_TIMEOUT, W_HEARTBEAT_TIMEOUT, W_OUT_OF_SECTION_TIMEOUT)


def decode(raw: bytes | memoryview, now_ns: int) -> BoardSnapshot:
    """Read the words up to the event ring; ``now_ns`` was taken after the bytes were read.

    Raises:
        BoardDamagedError: a word is outside what its writer can have written: a stamp outside [start of monitoring,
        now], too many sections, a name that isn't text.
    """
    words = _TABLE_FORMAT.unpack_from(raw)
    start = words[W_START]
    wrong = [
        *([W_MAGIC] if words[W_MAGIC] != MAGIC else []),
        *([W_START] if not 0 < start <= now_ns else []),
        *([W_CLOSING] if words[W_CLOSING] not in (0, CLOSING) else []),
        *(word for word in _STAMPS if words[word] and not start <= words[word] <= now_ns),
        *(word for word, most in _MOST.items() if words[word] > most),
        *(word for word in _TIMEOUTS if words[word] == 0),
    ]
    if wrong:
        raise BoardDamagedError(f"{_NAMES[wrong[0]]} is {words[wrong[0]]:#x} (began at {start}, now {now_ns})")
    return BoardSnapshot(  # type: ignore[misc]  # the slice ends before the fields that are named
        *words[_PLAIN],
        iteration=_iteration(words[W_ITERATION]),
        first_iteration=_iteration(words[W_FIRST_ITERATION]),
        closing=words[W_CLOSING] == CLOSING,
        own_initial_heartbeat_timeout_ns=_timeout(words[W_INITIAL_HEARTBEAT_TIMEOUT]),
        own_heartbeat_timeout_ns=_timeout(words[W_HEARTBEAT_TIMEOUT]),
        own_out_of_section_timeout_ns=_timeout(words[W_OUT_OF_SECTION_TIMEOUT]),
        is_out_of_section_calculated=words[W_OUT_OF_SECTION_CALCULATED] == 1,
        armed_initial_heartbeat_ns=words[W_INITIAL_HEARTBEAT_ARMED] or None,
        armed_heartbeat_ns=words[W_HEARTBEAT_ARMED] or None,
        armed_out_of_section=_armed(words, W_OUT_OF_SECTION_ARMED),
        sections=tuple(_decode_section(raw, words, index, now_ns) for index in range(words[W_SECTION_COUNT])),
        watch_only=words[W_WATCH_ONLY] == 1,
        collectives=_collectives(words),
    )


def timeout_word(seconds: float | None) -> int:
    """Return a timeout as a word: whole nanoseconds, at least one."""
    return NO_TIMEOUT if seconds is None else min(max(1, round(seconds * 1e9)), NO_TIMEOUT - 1)


def _armed(words: tuple[int, ...], at: int) -> ArmedTimeout | None:
    """Read an armed timeout, of any value: the monitor compares these words with what it has armed."""
    timeout_ns, flags = words[at : at + 2]
    return ArmedTimeout(timeout_ns, flags == ARMED_ENFORCED) if timeout_ns else None


def _collectives(words: tuple[int, ...]) -> CollectiveCounts | None:
    seen_ns, moved_ns, entered, completed, timeout_ns, *looks = words[W_COLLECTIVES_SEEN_AT : W_WAITS + 1]
    if not (seen_ns and moved_ns):
        return None
    return CollectiveCounts(seen_ns, moved_ns, entered, completed, timeout_ns or None, *looks)


def _decode_section(raw: bytes | memoryview, words: tuple[int, ...], index: int, now_ns: int) -> SectionView:
    at = slot(index)
    name_bytes = bytes(raw[8 * at : 8 * at + NAME_BYTES]).rstrip(b"\0")
    name = name_bytes.decode(errors="replace")
    opened_at, timeout = words[at + S_OPENED_AT], words[at + S_TIMEOUT]
    if not name or name.encode() != name_bytes or not timeout:
        raise BoardDamagedError(f"section {index} is called {name_bytes!r}, with a timeout of {timeout}")
    if opened_at and not words[W_START] <= opened_at <= now_ns:
        raise BoardDamagedError(f"section {index} is open since {opened_at} (began at {words[W_START]}, now {now_ns})")
    is_calculated = words[at + S_CALCULATED] == 1
    return SectionView(
        name, opened_at, words[at + S_OPEN_COUNT], _timeout(timeout), is_calculated, _armed(words, at + S_ARMED)
    )


def _iteration(word: int) -> int | None:
    return word - 1 if word else None


def _timeout(word: int) -> int | None:
    return None if word == NO_TIMEOUT else word
