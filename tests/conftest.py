"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from megatron_ft.launcher.rules.agent import report_unlisted
from tests.support.background import heed_the_terminal
from tests.support.slots import Slots

# Fixtures of many files; those that need an extra, or hold for every test of a file, are imported where they are used.
pytest_plugins = [f"tests.support.{name}" for name in ("launching", "netns", "etcd_server", "reactors")]

# No deadline for an example: on a loaded machine a healthy one takes seconds now and then. pytest-timeout
# bounds the test.
settings.register_profile("megatron_ft", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=4000)  # `make fuzz`
settings.load_profile("megatron_ft")

heed_the_terminal()


def _is_a_mistake(unlisted: str) -> None:
    raise AssertionError(unlisted)


report_unlisted(_is_a_mistake)
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


@pytest.fixture(autouse=True)
def _no_variable_left() -> Iterator[None]:
    """A variable of the environment that a test leaves behind would make the next one depend on their order."""
    before = _environment()
    yield
    assert _environment() == before


def _environment() -> dict[str, str]:
    at_import = ("PYTEST_", "PYTORCH_", "TORCHINDUCTOR_")  # modules set these when they are first imported
    return {name: value for name, value in os.environ.items() if not name.startswith(at_import)}
