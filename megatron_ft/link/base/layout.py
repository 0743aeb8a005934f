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

MAGIC = 0x4D46545F424F000A
"""'MFT_BO' and the layout's version: a board of another version isn't read."""
DAMAGED = int.from_bytes(b"damaged!", "little")
"""Magic word of a board on which a monitor has found damage, so that no other process reads it either."""
WORD_MASK = 2**64 - 1
NO_TIMEOUT = WORD_MASK

W_MAGIC = 0
W_CYCLE = 1
W_START = 2  # (monitor) start of monitoring
W_ITERATION = 3  # iteration + 1; 0 is unknown
W_ITERATIONS_SEEN = 4
W_FIRST_ITERATION = 5  # iteration + 1
W_FIRST_ITERATION_AT = 6
W_HEARTBEATS = 7
W_LAST_HEARTBEAT = 8
W_LAST_TRANSITION = 9  # written by every section event
W_CLOSING = 10  # CLOSING: the rank has ended its monitoring
W_LAST_LOOK = 11  # (monitor)
W_NEXT_LOOK = 12  # (monitor) when it will look again at the latest
W_TIMEOUTS_VERSION = 13
W_INITIAL_HEARTBEAT_TIMEOUT = 14
W_HEARTBEAT_TIMEOUT = 15
W_HEARTBEAT_FLAGS = 16
W_OUT_OF_SECTION_TIMEOUT = 17
W_WARMUP_ITERATIONS = 18
W_SECTION_COUNT = 19
W_RING_HEAD = 21
W_RANK = 22
W_PID = 23
W_FIRST_STEP_AT = 24  # when the second iteration or "step" began, and the first was over
W_STACK_SIGNAL = 25  # the signal that makes this rank write its stacks; 0: none
W_MAIN_THREAD = 26  # threading.get_ident() of its main thread
W_WARM_UP_OVER_AT = 28  # when the first iteration after those of the warm-up began
W_OUT_OF_SECTION_CALCULATED = 29  # 1: the rank's client has calculated it from observed intervals
W_WATCH_ONLY = 30  # (monitor) 1: the script calls no hooks, and only its collectives are written here
W_COLLECTIVES_SEEN_AT = 31  # when the counts were read last; 0: there is no process group
W_COLLECTIVE_AT = 32  # when one of the counts was seen to change
W_COLLECTIVES_ENTERED = 33
W_COLLECTIVES_COMPLETED = 34
# (monitor) learned timeouts that apply instead of the rank's own words; 0: none
W_OUT_OF_SECTION_ARMED = 35
W_OUT_OF_SECTION_ARMED_FLAGS = 36
W_INITIAL_HEARTBEAT_ARMED = 39
W_HEARTBEAT_ARMED = 40
# what the rank says of its run, for learning
W_LEARNING_FACTS = 41  # FACT_ bits
W_STEPS = 42  # training steps that have ended
W_SAVES = 43  # persistent saves that have ended
W_ITERATIONS_BACK = 44  # how often the iteration number went down: it is no measure of progress then
W_GROUP_TIMEOUT = 45  # timeout of the default process group; 0: unknown
W_STATE_WRITTEN = 46  # (launcher) STATE_ values: what became of the last timeouts that were to be written
W_LOOKS = 47  # looks at the collectives
W_LOOKS_WAITING = 48  # those that found the rank in a collective
W_WAITS = 49  # those of them that didn't find it in one the time before

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
_ALL_FACTS = 2 * FACT_RUN_ENDS - 1
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
S_ARMED = 12  # (monitor) as W_OUT_OF_SECTION_ARMED and the words after it
S_ARMED_FLAGS = 13

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

    cycle: int
    start_ns: int
    iteration: int | None
    iterations_seen: int
    first_iteration: int | None
    first_iteration_at_ns: int
    heartbeats: int
    last_heartbeat_ns: int
    last_transition_ns: int
    closing: bool
    last_look_ns: int
    next_look_ns: int
    timeouts_version: int
    own_initial_heartbeat_timeout_ns: int | None
    own_heartbeat_timeout_ns: int | None
    heartbeat_flags: int
    own_out_of_section_timeout_ns: int | None
    warmup_iterations: int
    ring_head: int
    rank: int
    pid: int
    sections: tuple[SectionView, ...]
    first_step_at_ns: int = 0
    stack_signal: int = 0
    main_thread: int = 0
    warm_up_over_ns: int = 0
    is_out_of_section_calculated: bool = False
    armed_out_of_section: ArmedTimeout | None = None
    armed_initial_heartbeat_ns: int | None = None
    armed_heartbeat_ns: int | None = None
    learning_facts: int = 0
    """FACT_ bits."""
    steps: int = 0
    saves: int = 0
    iterations_back: int = 0
    group_timeout_ns: int | None = None
    """Timeout of the default process group; None if unknown."""
    watch_only: bool = False
    """True if the script calls no hooks."""
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


def decode(raw: bytes | memoryview, now_ns: int) -> BoardSnapshot:
    """Read the words up to the event ring; ``now_ns`` was taken after the bytes were read.

    Raises:
        BoardDamagedError: a word is outside what its writer can have written: a stamp outside [start of monitoring,
        now], too many sections, a name that isn't text.
    """
    words = _TABLE_FORMAT.unpack_from(raw)
    start, count, closing = words[W_START], words[W_SECTION_COUNT], words[W_CLOSING]
    if words[W_MAGIC] != MAGIC:
        raise BoardDamagedError(f"magic word is {words[W_MAGIC]:#x}")
    if not 0 < start <= now_ns:
        raise BoardDamagedError(f"start of monitoring is {start}")
    if count > MAX_SECTIONS:
        raise BoardDamagedError(f"section count is {count}")
    if closing not in (0, CLOSING):
        raise BoardDamagedError(f"end of the monitoring is {closing:#x}")
    sections = tuple(_decode_section(raw, words, index, start, now_ns) for index in range(count))
    board = BoardSnapshot(
        cycle=words[W_CYCLE],
        start_ns=start,
        iteration=_iteration(words[W_ITERATION]),
        iterations_seen=words[W_ITERATIONS_SEEN],
        first_iteration=_iteration(words[W_FIRST_ITERATION]),
        first_iteration_at_ns=words[W_FIRST_ITERATION_AT],
        heartbeats=words[W_HEARTBEATS],
        last_heartbeat_ns=words[W_LAST_HEARTBEAT],
        last_transition_ns=words[W_LAST_TRANSITION],
        closing=closing == CLOSING,
        last_look_ns=words[W_LAST_LOOK],
        next_look_ns=words[W_NEXT_LOOK],
        timeouts_version=words[W_TIMEOUTS_VERSION],
        own_initial_heartbeat_timeout_ns=_timeout("initial heartbeat", words[W_INITIAL_HEARTBEAT_TIMEOUT]),
        own_heartbeat_timeout_ns=_timeout("heartbeat", words[W_HEARTBEAT_TIMEOUT]),
        heartbeat_flags=words[W_HEARTBEAT_FLAGS],
        own_out_of_section_timeout_ns=_timeout("out of section", words[W_OUT_OF_SECTION_TIMEOUT]),
        warmup_iterations=words[W_WARMUP_ITERATIONS],
        ring_head=words[W_RING_HEAD],
        rank=words[W_RANK],
        pid=words[W_PID],
        sections=sections,
        first_step_at_ns=words[W_FIRST_STEP_AT],
        stack_signal=words[W_STACK_SIGNAL],
        main_thread=words[W_MAIN_THREAD],
        warm_up_over_ns=words[W_WARM_UP_OVER_AT],
        is_out_of_section_calculated=words[W_OUT_OF_SECTION_CALCULATED] == 1,
        armed_out_of_section=_armed(words, W_OUT_OF_SECTION_ARMED),
        armed_initial_heartbeat_ns=words[W_INITIAL_HEARTBEAT_ARMED] or None,
        armed_heartbeat_ns=words[W_HEARTBEAT_ARMED] or None,
        learning_facts=words[W_LEARNING_FACTS],
        steps=words[W_STEPS],
        saves=words[W_SAVES],
        iterations_back=words[W_ITERATIONS_BACK],
        group_timeout_ns=words[W_GROUP_TIMEOUT] or None,
        watch_only=words[W_WATCH_ONLY] == 1,
        collectives=_collectives(words),
    )
    _check(board, now_ns)
    return board


_STAMPS = (
    *("first_iteration_at_ns", "first_step_at_ns", "warm_up_over_ns"),
    *("last_heartbeat_ns", "last_transition_ns", "last_look_ns"),
)
_COUNTS = (
    *("iterations_seen", "warmup_iterations", "heartbeats", "ring_head", "timeouts_version"),
    *("steps", "saves", "iterations_back"),
)


def _check(board: BoardSnapshot, now_ns: int) -> None:
    for name in _STAMPS:
        _check_stamp(name, getattr(board, name), board.start_ns, now_ns)
    for name in _COUNTS:
        if getattr(board, name) > MOST_COUNT:
            raise BoardDamagedError(f"{name} is {getattr(board, name)}")
    if board.learning_facts > _ALL_FACTS:
        raise BoardDamagedError(f"facts for learning are {board.learning_facts:#x}")
    if (counts := board.collectives) is not None:
        for name in ("seen_ns", "moved_ns"):
            _check_stamp(f"{name} of collectives", getattr(counts, name), board.start_ns, now_ns)
        if max(counts.looks, counts.waiting, counts.waits) > MOST_COUNT:
            raise BoardDamagedError(f"looks at collectives are {counts[-3:]}")


def timeout_word(seconds: float | None) -> int:
    """Return a timeout as a word: whole nanoseconds, at least one."""
    return NO_TIMEOUT if seconds is None else min(max(1, round(seconds * 1e9)), NO_TIMEOUT - 1)


def armed_words(armed: ArmedTimeout | None) -> tuple[int, int]:
    """Return the two words of an armed timeout."""
    if armed is None:
        return 0, 0
    return armed.timeout_ns, ARMED_ENFORCED if armed.enforced else 0


def encode_name(name: str) -> bytes:
    """Return a section's name, padded with zeros; the config has checked that it fits."""
    data = name.encode()
    assert len(data) < NAME_BYTES, name
    return data.ljust(NAME_BYTES, b"\0")


def _armed(words: tuple[int, ...], at: int) -> ArmedTimeout | None:
    """Read an armed timeout, of any value: the monitor compares these words with what it has armed."""
    timeout_ns, flags = words[at : at + 2]
    return ArmedTimeout(timeout_ns, flags == ARMED_ENFORCED) if timeout_ns else None


def _collectives(words: tuple[int, ...]) -> CollectiveCounts | None:
    at = W_COLLECTIVES_SEEN_AT, W_COLLECTIVE_AT, W_COLLECTIVES_ENTERED, W_COLLECTIVES_COMPLETED
    looks = words[W_LOOKS], words[W_LOOKS_WAITING], words[W_WAITS]
    seen_ns, moved_ns, entered, completed = (words[word] for word in at)
    timeout_ns = words[W_GROUP_TIMEOUT] or None
    found = CollectiveCounts(seen_ns, moved_ns, entered, completed, timeout_ns, *looks)
    return found if found.seen_ns and found.moved_ns else None


def _decode_section(
    raw: bytes | memoryview, words: tuple[int, ...], index: int, start: int, now_ns: int
) -> SectionView:
    at = slot(index)
    name_bytes = bytes(raw[8 * at : 8 * at + NAME_BYTES]).rstrip(b"\0")
    try:
        name = name_bytes.decode()
    except UnicodeDecodeError:
        raise BoardDamagedError(f"name of section {index} is {name_bytes!r}") from None
    if not name:
        raise BoardDamagedError(f"name of section {index} is empty")
    opened_at = words[at + S_OPENED_AT]
    _check_stamp(f"start of section {name!r}", opened_at, start, now_ns)
    return SectionView(
        name,
        opened_at,
        words[at + S_OPEN_COUNT],
        _timeout(name, words[at + S_TIMEOUT]),
        words[at + S_CALCULATED] == 1,
        _armed(words, at + S_ARMED),
    )


def _check_stamp(what: str, stamp: int, start: int, now_ns: int) -> None:
    if stamp and not start <= stamp <= now_ns:
        raise BoardDamagedError(f"{what} is {stamp}, outside [{start}, {now_ns}]")


def _iteration(word: int) -> int | None:
    return word - 1 if word else None


def _timeout(what: str, word: int) -> int | None:
    if word == 0:
        raise BoardDamagedError(f"timeout of {what} is 0")
    return None if word == NO_TIMEOUT else word
