"""Metrics over HTTP: what is served, and scrapers that are slow, stuck or many."""

from __future__ import annotations

import http.client
import importlib.util
import socket
from collections.abc import Iterator

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.records import exposition
from megatron_ft.records.exposition import MetricsServer, as_text, check_installed
from megatron_ft.records.rules.metrics import ITERATION, RESTARTS, Series

SHOWN = (Series(RESTARTS, {("hang",): 2.0}), Series(ITERATION, {(): 41.0}))


def shown() -> tuple[Series, ...]:
    return SHOWN


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, shown)
    yield made
    made.close()


def get(port: int, accept: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics", headers={"Accept": accept})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_counter_and_gauge_are_served_in_the_text_format(server: MetricsServer) -> None:
    status, body = get(server.port)
    assert status == 200
    assert 'megatron_ft_restarts_total{cause="hang"} 2.0' in body.splitlines()
    assert "# TYPE megatron_ft_iteration gauge" in body.splitlines()
    assert body == as_text(shown).decode()


def test_scraper_that_sends_nothing_keeps_no_other_from_its_answer(server: MetricsServer) -> None:
    stuck = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    assert get(server.port)[0] == 200
    for each in stuck:
        each.close()


def test_fifth_scraper_at_once_is_refused_and_served_when_another_has_gone(server: MetricsServer) -> None:
    stuck = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        for _ in range(100):  # until the threads of the others are there
            get(server.port)
    for each in stuck:
        each.close()
    for attempt in range(100):
        try:
            assert get(server.port)[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            assert attempt < 99


@pytest.mark.parametrize(("host", "where"), [("127.0.0.1", r"127\.0\.0\.1:"), ("", "port ")])
def test_taken_port_is_a_mistake_in_one_line(host: str, where: str) -> None:
    first = MetricsServer(host, 0, shown)
    with pytest.raises(ConfigError, match=rf"^no metrics can be served at {where}{first.port}: Address already in use"):
        MetricsServer(host, first.port, shown)
    first.close()


def test_missing_library_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"^--ft-metrics-port needs prometheus_client, .* 'megatron-ft\[metrics\]'$"):
        check_installed("--ft-metrics-port")
    assert exposition.__doc__
