"""Wait between two cycles until the driver has taken back the device memory of the last ranks.

An ended process may be listed a moment longer, while the driver takes its memory back; a new rank that allocates then
finds too little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

from megatron_ft.link.base.process_facts import Holding
from megatron_ft.link.base.wording import listed
from megatron_ft.link.facts import launcher as records
from megatron_ft.link.linux import nvml
from megatron_ft.link.reactor import THREAD_PREFIX, Reactor
from megatron_ft.records.event_log import EventLog

LONGEST_WAIT_S = 10.0
"""Seconds after which the memory counts as lost, and the ranks start without it."""
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.02, 0.5
_SHOWN = 4
TELL_AFTER_S = 1.0
DRIVER_S = 5.0
"""Additional seconds for the driver's answer; a slower driver isn't asked again."""
_RECENT_S = LONGEST_WAIT_S + DRIVER_S


def describe(held: Sequence[Holding]) -> str:
    """Describe the holdings for a line: process, device, size."""
    sizes = ["" if each.used_bytes is None else f" ({each.used_bytes / 2**30:.1f} GiB)" for each in held]
    parts = [f"process {each.pid} on GPU {each.device}{size}" for each, size in zip(held, sizes, strict=True)]
    return listed(parts, most=_SHOWN)


class _Look(threading.Thread):
    """The queries of one wait. ``waited_s``: from their beginning to the last one."""

    def __init__(self, query: Callable[[], list[Holding]]) -> None:
        super().__init__(name=f"{THREAD_PREFIX}device_memory", daemon=True)
        self._query = query
        self.held: list[Holding] = []
        self.saw_any, self.waited_s, self.began_s = False, 0.0, time.monotonic()

    def run(self) -> None:
        while True:
            self.held = self._query()
            self.waited_s = time.monotonic() - self.began_s
            self.saw_any = self.saw_any or bool(self.held)
            left_s = LONGEST_WAIT_S - self.waited_s
            if not self.held or left_s <= 0:
                return
            time.sleep(min(max(_FIRST_LOOK_S, self.waited_s / 4), _SLOWEST_LOOK_S, left_s))


@dataclass
class DeviceMemoryWait:
    """Queries while the nodes meet, so that usually no start waits. Does nothing without an NVIDIA driver."""

    reactor: Reactor
    _: KW_ONLY
    log: EventLog
    say: Callable[[str], None]
    _look: _Look | None = None
    _gave_up: bool = False

    def begin(self, ended: Collection[int]) -> None:
        """Query, in a thread because the driver may be slow, until no memory of these ended processes is held."""
        self._look = None
        library = None if self._gave_up or not ended else nvml.load()
        if library is not None:
            self._look = _Look(lambda: [each for each in nvml.holdings(library) or [] if each.pid in ended])
            self._look.start()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the memory is free, or given up; serves everything else meanwhile.

        Raises:
            any exception of ``check``, which is called after each event.
        """
        look, self._look = self._look, None
        if look is None:
            return

        def say_waiting() -> None:
            if look.held:
                text = f"waiting for device memory of the last cycle, at most {LONGEST_WAIT_S:g} s"
                self.say(f"{text}: {describe(look.held)}")

        if look.is_alive():
            tell = self.reactor.call_later(TELL_AFTER_S, say_waiting)
            try:
                self.reactor.call_blocking(lambda: look.join(LONGEST_WAIT_S + DRIVER_S), check)
            finally:
                tell.cancel()
        if look.is_alive():
            self._gave_up = True
            self.say("the NVIDIA driver is not responding: no longer waiting for the device memory of exited ranks")
        elif look.saw_any and time.monotonic() - look.began_s <= _RECENT_S:  # this node may have stood by since
            if look.held:
                waited = f"after {look.waited_s:.1f} s device memory of the last cycle is still held"
                self.say(f"{waited}: {describe(look.held)}; starting the ranks without waiting any longer")
            self.log.write(records.DeviceMemory(waited_s=round(look.waited_s, 3), held=tuple(look.held)))
