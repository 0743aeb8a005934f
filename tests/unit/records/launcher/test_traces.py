"""Traces to a collector that answers, refuses, or is stuck; and which variables ask for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from megatron_ft.link.facts.launcher import Cause, CycleEnded, CycleStarted
from megatron_ft.records.launcher.traces import Traces, are_wanted, resource_attributes
from megatron_ft.records.rules.spans import IS_OVERHEAD

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


def a_cycle(traces: Traces) -> None:
    now = time.monotonic_ns()
    traces.hear(CycleStarted(cycle=0, group_rank=0, begun_ns=now, met_ns=now, spawned_ns=now), now)
    traces.hear(CycleEnded(cycle=0, outcome="failed", cause=Cause(text="node lost")), now)


def made(endpoint: str, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Traces:
    monkeypatch.setenv(ENDPOINT, endpoint)
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    resource = resource_attributes({}, run_id="r", node="a", infra_rank=3)
    return Traces(resource, node="a", say=said.append)


def test_collector_gets_all_spans_of_a_cycle_as_children_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    said: list[str] = []
    with collector() as (endpoint, bodies):
        traces = made(endpoint, monkeypatch, said)
        a_cycle(traces)
        assert traces.wait(30.0)
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = [
        span for each in requests for of in each.resource_spans for scope in of.scope_spans for span in scope.spans
    ]
    (cycle,) = [span for span in spans if span.name == "nvrx.ft.cycle"]
    assert {span.name for span in spans} == IS_OVERHEAD.keys() - {"nvrx.ft.health_check"}
    assert {span.trace_id for span in spans} == {cycle.trace_id}
    assert {span.parent_span_id for span in spans if span is not cycle} == {cycle.span_id}
    wall_ns = time.time_ns()
    assert all(wall_ns - 60e9 < span.start_time_unix_nano <= span.end_time_unix_nano <= wall_ns for span in spans)
    resource = {each.key: each.value for each in requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "ft_launcher"
    assert (resource["nemo.run.id"].string_value, resource["nvrx.infra_rank"].int_value) == ("r", 3)
    assert said == []


def test_collector_that_refuses_costs_the_launcher_nothing_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said: list[str] = []
    traces = made(f"http://127.0.0.1:{port}", monkeypatch, said)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    began_s = time.monotonic()
    a_cycle(traces)
    a_cycle(traces)
    assert time.monotonic() - began_s < 0.5
    traces.wait(30.0)
    began_s = time.monotonic()
    traces.close()
    assert time.monotonic() - began_s < 0.5
    assert said == [f"traces can't be sent to http://127.0.0.1:{port}/v1/traces: these spans are lost"]


def test_collector_that_is_stuck_costs_the_end_of_the_launcher_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts in the kernel, and never answers
        traces = made(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch, [])
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        began_s = time.monotonic()
        a_cycle(traces)
        traces.close()
        assert time.monotonic() - began_s < 1.5
        traces.wait(30.0)  # not to leave a thread that uses the listener


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"NEMO_LENS_ENABLED": "1"}, True),
        ({ENDPOINT: "http://c:4318", "NEMO_LENS_ENABLED": "0"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_standard_variables_switch_traces_on_and_off(environ: Mapping[str, str], wanted: bool) -> None:
    assert are_wanted(environ) is wanted


def test_resource_names_a_job_as_megatron_lm_does() -> None:
    environ = {"SLURM_JOB_ID": "47", "SLURM_CLUSTER_NAME": "eos", "OTEL_SERVICE_NAME": "mine"}
    found = resource_attributes(environ, run_id="r", node="a", infra_rank=None)
    assert found == {
        "slurm.job.id": "47",
        "slurm.cluster": "eos",
        "nemo.lens.job_uuid": "e9bc01c2-91b3-57dc-820a-ade4e74fc391",
        "nemo.run.id": "47",
        "host.name": "a",
    }
    element = {**environ, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"}
    other = resource_attributes(element, run_id="r", node="a", infra_rank=None)
    assert other["nemo.lens.job_uuid"] != found["nemo.lens.job_uuid"]
