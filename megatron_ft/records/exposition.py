"""Metrics for Prometheus: served over HTTP, or as the text that node_exporter's textfile collector reads.

A scraper that is slow, stuck or malicious holds a daemon thread of its own for a while, of at most `_MOST_REQUESTS`;
nothing else of this process waits for one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.errors import ConfigError
from megatron_ft.records.rules.metrics import SHOWN_BOUNDS_S, Histogram, Series

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_MOST_REQUESTS = 4
_REQUEST_S = 10.0
"""Seconds a scraper may take to send its request, or to read one block of the answer."""
_NO_DESCRIPTOR_S = 1.0

Collect = Callable[[], Sequence[Series]]
"""Returns the values now; called from any thread."""


def check_installed(what: str) -> None:
    """Raise a ConfigError if ``what``, an option or a command, can't be had without prometheus_client."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(f"{what} needs prometheus_client, which isn't installed: pip install 'megatron-ft[metrics]'")


def as_text(collect: Collect) -> bytes:
    """Return the values in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(_registry(collect))


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the values at ``/metrics`` (and at any other path), from threads of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, collect: Collect) -> None:
        """Listen on ``host`` (empty: all addresses) and ``port`` (0: any free one).

        Raises:
            ConfigError: ``port`` is taken, or ``host`` isn't one of this machine.
        """
        from prometheus_client import MetricsHandler

        handler: Any = type("Handler", (MetricsHandler,), {"timeout": _REQUEST_S})
        try:
            listener = _listen(host, port)
        except OSError as error:
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror  # negative: of a name server
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host else f"port {port}"
            raise ConfigError(f"no metrics can be served at {where}: {why}") from None
        self.port: int = listener.getsockname()[1]
        super().__init__(listener.getsockname(), handler.factory(_registry(collect)), bind_and_activate=False)
        self.socket.close()  # replaced by one of the right family
        self.socket = listener
        self._room = threading.Semaphore(_MOST_REQUESTS)
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening; requests in progress are left to their threads."""
        threading.Thread(target=self.shutdown, daemon=True).start()  # it waits for the loop
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which holds the port for the rest of its poll otherwise
        self.server_close()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_NO_DESCRIPTOR_S)  # none is free now
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            try:
                super().finish_request(request, client_address)
            finally:
                self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a scraper that has gone, or is too slow."""


def _listen(host: str, port: int) -> socket.socket:
    if host:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6, or the port is taken: the next one tells
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _registry(collect: Collect) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    collector: Any = type("Shown", (), {"collect": lambda _: _families(collect())})
    registry.register(collector())
    return registry


def _families(shown: Sequence[Series]) -> Iterator[Family]:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    for series in shown:
        metric = series.metric
        family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
        for labels, value in series.values.items():
            if isinstance(value, Histogram):
                counts = itertools.accumulate(value.counts)  # of values that are not above each bound
                family.add_metric(labels, [*zip([*map(str, SHOWN_BOUNDS_S), "+Inf"], counts, strict=True)], value.sum_s)
            else:
                family.add_metric(labels, value)
        yield family
