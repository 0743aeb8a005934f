"""The progress board in memory: made by the monitor, mapped by the monitor, its rank and the launcher.

The memory is a memfd whose pages are allocated before it is handed out: a node without memory gives an
error when monitoring starts, never a SIGBUS in a rank. It has no name, and is gone with the last process that
maps it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from types import MappingProxyType

from megatron_ft.link.base import layout
from megatron_ft.link.base.layout import ArmedTimeout, BoardSnapshot
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor


def create_memory() -> int:
    """Return a zeroed memfd of the board's size with every page allocated.

    Raises:
        OSError: there is no memory for it.
    """
    fd = os.memfd_create("megatron_ft_board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, layout.BOARD_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd


class Board:
    """One mapped board. ``words`` is the live memory; ``link.base.layout`` defines each word."""

    def __init__(self, fd: int) -> None:
        """Map the memory behind ``fd``, which stays the caller's.

        Raises:
            OSError, ValueError: ``fd`` isn't a board's memory.
        """
        self._map, self._own_fd = _mapped(fd)
        self.words: memoryview = memoryview(self._map).cast("Q")

    def initialise(
        self,
        *,
        cycle: int,
        rank: int,
        pid: int,
        start_ns: int,
        warmup_iterations: int,
        watch_only: bool = False,
        initial_heartbeat: float | None = None,
        heartbeat: float | None = None,
        out_of_section: float | None = None,
        sections: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        """Fill a fresh, zeroed board. The last four are timeouts in seconds; None is infinite.

        The magic word is written last: a board without it isn't read.
        """
        words = self.words
        words[layout.W_CYCLE] = cycle
        words[layout.W_RANK] = rank
        words[layout.W_PID] = pid
        words[layout.W_START] = start_ns
        words[layout.W_LAST_TRANSITION] = start_ns
        words[layout.W_WARMUP_ITERATIONS] = warmup_iterations
        words[layout.W_WATCH_ONLY] = watch_only
        words[layout.W_INITIAL_HEARTBEAT_TIMEOUT] = layout.timeout_word(initial_heartbeat)
        words[layout.W_HEARTBEAT_TIMEOUT] = layout.timeout_word(heartbeat)
        words[layout.W_OUT_OF_SECTION_TIMEOUT] = layout.timeout_word(out_of_section)
        for index, (name, timeout) in enumerate(sections.items()):
            self.put_section(index, name, timeout)
        words[layout.W_SECTION_COUNT] = len(sections)
        words[layout.W_TIMEOUTS_VERSION] = 1
        words[layout.W_MAGIC] = layout.MAGIC

    def put_section(self, index: int, name: str, timeout_s: float | None) -> None:
        """Write the rank's words of a section, read once the count includes it; None is no timeout.

        Raises:
            ValueError: the table is full.
        """
        if index >= layout.MAX_SECTIONS:
            raise ValueError(f"section {name!r} is one too many: at most {layout.MAX_SECTIONS} are allowed")
        at, text = layout.slot(index), name.encode()
        assert len(text) < layout.NAME_BYTES, name  # the config has checked that it fits
        for offset, word in enumerate(memoryview(text.ljust(layout.NAME_BYTES, b"\0")).cast("Q")):
            self.words[at + offset] = word
        self.words[at + layout.S_OPENED_AT] = 0
        self.words[at + layout.S_OPEN_COUNT] = 0
        self.words[at + layout.S_TIMEOUT] = layout.timeout_word(timeout_s)
        self.words[at + layout.S_CALCULATED] = 0

    def put_armed(self, board: BoardSnapshot) -> None:
        """Write the armed timeouts of ``board`` where the words differ."""
        words = self.words
        _put_armed(words, layout.W_OUT_OF_SECTION_ARMED, board.armed_out_of_section)
        for index, section in enumerate(board.sections):
            _put_armed(words, layout.slot(index) + layout.S_ARMED, section.armed)
        words[layout.W_INITIAL_HEARTBEAT_ARMED] = board.armed_initial_heartbeat_ns or 0
        words[layout.W_HEARTBEAT_ARMED] = board.armed_heartbeat_ns or 0

    def put_place(self, text: str) -> None:
        """Write the rank's place in its code; a concurrent reader may see parts of two texts."""
        data = text.encode()[: 8 * layout.PLACE_WORDS].ljust(8 * layout.PLACE_WORDS, b"\0")
        self.words[layout.PLACE : layout.PLACE + layout.PLACE_WORDS] = memoryview(data).cast("Q")

    def place(self) -> str:
        """Return the last text of ``put_place``, empty without one."""
        words = self.words[layout.PLACE : layout.PLACE + layout.PLACE_WORDS]
        return words.tobytes().rstrip(b"\0").decode(errors="replace")

    def snapshot(self) -> BoardSnapshot:
        """Read everything but the ring.

        Raises:
            BoardDamagedError: a word has a value that its writer can't have written.
        """
        return layout.decode(self.raw(), time.monotonic_ns())

    def raw(self) -> bytes:
        """Return a copy of the words before the ring, for ``layout.decode``."""
        return self._map[: 8 * layout.RING]

    def ring_words(self, since_head: int, head: int) -> tuple[int, list[int]]:
        """Return the first number, and two words of each event, from ``since_head`` up to ``head``.

        Events that the rank has overwritten, even during the read, are left out.
        """
        begin = max(since_head, head - layout.RING_EVENTS)
        first, last = begin & layout.RING_MASK, head & layout.RING_MASK
        ring = self.words[layout.RING : layout.PLACE]
        if begin >= head:
            return head, []
        if first < last:
            found = ring[2 * first : 2 * last].tolist()
        else:
            found = ring[2 * first :].tolist() + ring[: 2 * last].tolist()
        # the rank may be about to write the next one
        oldest = min(max(begin, self.words[layout.W_RING_HEAD] + 1 - layout.RING_EVENTS), head)
        return oldest, found[2 * (oldest - begin) :]

    def close(self) -> None:
        """Unmap. Idempotent."""
        self.words.release()
        if self._own_fd.is_ours or self._map.closed:
            self._map.close()
            return
        # the mapping would close its descriptor, whose number belongs to another file by now
        _never_closed.append(self._map)


_never_closed: list[mmap.mmap] = []


def _mapped(fd: int) -> tuple[mmap.mmap, KeptDescriptor]:
    """Map a board's memory. Return also the mapping's own duplicate of ``fd``, which mmap doesn't expose."""
    wanted = os.fstat(fd)
    free = os.dup(fd)
    os.close(free)
    mapping = mmap.mmap(fd, layout.BOARD_BYTES)  # takes the lowest free number
    # all others, too: another thread may have opened one in the meantime
    for number in (free, *map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):
            if number != fd and os.path.samestat(os.fstat(number), wanted):
                return mapping, KeptDescriptor(number)
    return mapping, KeptDescriptor(-1)


def _put_armed(words: memoryview, at: int, armed: ArmedTimeout | None) -> None:
    wanted = (0, 0) if armed is None else (armed.timeout_ns, layout.ARMED_ENFORCED * armed.enforced)
    if (words[at], words[at + 1]) != wanted:
        words[at], words[at + 1] = wanted
