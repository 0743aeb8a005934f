"""Work on a list in several threads, of which the calling one is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def each_of(items: Sequence[_T], work: Callable[[_T], object], most: int) -> None:
    """Call ``work`` with each item, in that number of threads at most. The first failure is raised, and ends all."""
    left = iter(items)  # of a list, which gives each item to one thread
    failed: list[BaseException] = []
    helpers: list[threading.Thread] = []

    def work_on() -> None:
        try:
            for item in left:
                if failed:
                    return
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failed.append(error)

    for _ in range(min(most, len(items)) - 1):
        thread = threading.Thread(target=work_on, name="ft_copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, or Python ends: this one does the rest
            break
        helpers.append(thread)
    work_on()
    for thread in helpers:
        thread.join()
    if failed:
        raise failed[0]
