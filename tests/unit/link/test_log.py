"""Loggers of the package: where lines go by default, and who may take them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megatron_ft.link import log


@pytest.fixture
def written() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def mine(written: list[tuple[int, str]]) -> Iterator[log.Log]:
    yield log.Log("test", "[test] ", lambda level, text: written.append((level, text)))
    logger = logging.getLogger("megatron_ft.test")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_debug_level_writes_messages_in_one_bounded_line(mine: log.Log, written: list[tuple[int, str]]) -> None:
    mine.set_level(log.DEBUG)
    mine.debug("from", "a\nb")
    mine.debug("x" * 5000)
    assert written[0] == (10, "[test] DEBUG: from a b")
    assert len(written[1][1]) < 1100


def test_handler_of_an_application_takes_the_lines(mine: log.Log, written: list[tuple[int, str]]) -> None:
    taken: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: taken.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ft").addHandler(handler)
    try:
        mine.say(log.INFO, "line")
    finally:
        logging.getLogger("megatron_ft").removeHandler(handler)
    assert (taken, written) == (["[test] line"], [])
