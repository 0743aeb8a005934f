"""What all tests share."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_ft.launcher.rules.agent import report_unlisted
from megatron_ft.link.reactor import Reactor
from tests.support.background import heed_the_terminal

# Fixtures of many files; those that need an extra, or hold for every test of a file, are imported where they are used.
pytest_plugins = [f"tests.support.{name}" for name in ("launching", "netns", "etcd_server")]

# No deadline for an example: on a loaded machine a healthy one takes seconds now and then. pytest-timeout
# bounds the test.
settings.register_profile("megatron_ft", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=4000)  # `make fuzz`
settings.load_profile("megatron_ft")

heed_the_terminal()


def _is_a_mistake(unlisted: str) -> None:
    raise AssertionError(unlisted)


report_unlisted(_is_a_mistake)
_LOOK_S = 0.02
_LONGEST_WAIT_S = 300.0


class Slots:
    """Limit of how many tests run at a time on this machine, over all copies of the suite that run there side by side.

    Without it two copies start twice as many tests, which slow each other down until one exceeds its time limit. Slots
    are bytes of a file that all copies lock. A lock ends with its process, whatever that forked.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._count = count

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Have one, as soon as one is free; go on without one if that takes too long."""
        until_s = time.monotonic() + _LONGEST_WAIT_S
        while (slot := self.take()) is None and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if slot is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)

    def take(self) -> int | None:
        for slot in range(self._count):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except (BlockingIOError, PermissionError):  # which one depends on the system
                continue
            return slot
        return None


_SLOTS = pytest.StashKey[Slots | None]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Pytest's own directory of this user is where all its runs meet. A few tests by hand wait for nothing."""
    slots = None
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        slots = Slots(base.parent.parent / "megatron_ft.slots", 2 * (os.cpu_count() or 1) + 1)
    session.config.stash[_SLOTS] = slots


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch, Lightning and the tests stay: each look at them by the garbage collector would take most of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's, whose time begins with the test
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test waits for its turn; one that itself waits for most of its time disturbs nobody."""
    slots = None if item.get_closest_marker("waits") else item.config.stash[_SLOTS]
    with contextlib.nullcontext() if slots is None else slots.one():
        return (yield)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    """Closed afterwards."""
    made = Reactor()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_variable_left() -> Iterator[None]:
    """A variable of the environment that a test leaves behind would make the next one depend on their order."""
    before = _environment()
    yield
    assert _environment() == before


def _environment() -> dict[str, str]:
    at_import = ("PYTEST_", "PYTORCH_", "TORCHINDUCTOR_")  # modules set these when they are first imported
    return {name: value for name, value in os.environ.items() if not name.startswith(at_import)}
