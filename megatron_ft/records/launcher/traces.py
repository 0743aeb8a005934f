"""Spans of this launcher's cycles, sent by OTLP over HTTP, if the standard variables of OpenTelemetry ask for it.

A thread of its own imports the SDK, makes the spans and sends them. A collector that doesn't answer costs spans, and no
time: what waits for it is bounded, and the launcher's end waits only for a collector that has answered before.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import megatron_ft
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.records.rules.spans import CYCLE, NodeSpans, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import Span as OpenSpan

SERVICE = "ft_launcher"
"""``service.name``, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says otherwise."""
_MOST_BYTES, _SPAN_BYTES = 1 << 20, 1000
_LAST_S = 1.0
"""Seconds the launcher's end may wait for its last spans, if the collector has answered before."""
_MODULE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_OFF = ("0", "false", "no", "off")
_SLURM = {
    "slurm.job.id": "SLURM_JOB_ID",
    "slurm.sluid": "LENS_SLURM_SLUID",
    "slurm.cluster": "SLURM_CLUSTER_NAME",
    "slurm.array.job_id": "SLURM_ARRAY_JOB_ID",
    "slurm.array.task_id": "SLURM_ARRAY_TASK_ID",
    "slurm.array.sluid": "LENS_SLURM_ARRAY_SLUID",
    "slurm.restart_count": "SLURM_RESTART_COUNT",
}
"""Resource attributes that Megatron-LM takes from the environment, too (``global_vars.py``)."""


def are_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if the environment asks for traces: an endpoint, or NEMO_LENS_ENABLED, and nothing against it."""
    lens = environ.get("NEMO_LENS_ENABLED", "").strip().lower()
    if lens in _OFF or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in ("", "otlp"):
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(lens) or any(environ.get(name) for name in endpoints)


def why_not(environ: Mapping[str, str]) -> str:
    """Return why wanted traces can't be sent, in words; empty if they can."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        return f"the protocol is {protocol}, and ft_launcher sends http/protobuf only (port 4318 of a collector)"
    try:
        found = importlib.util.find_spec(_MODULE)
    except ModuleNotFoundError:
        found = None
    return "" if found else "opentelemetry isn't installed: pip install 'megatron-ft[traces]'"


def resource_attributes(
    environ: Mapping[str, str], *, run_id: str, node: str, infra_rank: int | None
) -> dict[str, str | int]:
    """Return what describes this launcher in every span: as Megatron-LM describes its ranks, as far as both know it."""
    found: dict[str, str | int] = {name: environ[each] for name, each in _SLURM.items() if environ.get(each)}
    array = environ.get("SLURM_ARRAY_JOB_ID") if "SLURM_ARRAY_TASK_ID" in environ else None
    job = array or environ.get("SLURM_JOB_ID")
    if job:
        name = f"nemo.lens.job/{environ.get('SLURM_CLUSTER_NAME', 'nocluster')}/{job}"
        found["nemo.lens.job_uuid"] = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    found["nemo.run.id"] = environ.get("NEMO_LENS_RUN_ID") or environ.get("SLURM_JOB_ID") or run_id
    found["host.name"] = node
    if infra_rank is not None:
        found["nvrx.infra_rank"] = infra_rank
    if "service.name" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", "") and not environ.get("OTEL_SERVICE_NAME"):
        found["service.name"] = SERVICE
    return found


class Traces:
    """Sends the spans of one launcher."""

    def __init__(self, resource: Mapping[str, str | int], *, node: str, say: Callable[[str], None]) -> None:
        self._spans = NodeSpans(node, time.monotonic_ns())
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._thread = FileQueue(_MOST_BYTES)
        self._has_failed = False
        """True if the last spans could not be sent."""
        self._resource = resource
        self._say = say
        # used by the thread only
        self._sender: _Sender | None = None
        self._is_told = False

    def hear(self, record: Record, at_ns: int) -> None:
        """Send the spans that a record of this time completes."""
        spans = self._spans.hear(record, at_ns)
        if spans:
            self._thread.do(functools.partial(self._send, spans), _SPAN_BYTES * len(spans))

    def wait(self, bound_s: float) -> bool:
        """Wait up to ``bound_s`` seconds until all spans are sent or lost. Return True if they are."""
        return self._thread.wait(bound_s)

    def close(self) -> None:
        """Wait for a collector that answers, and not for one that doesn't."""
        if not self._has_failed:
            self.wait(_LAST_S)

    def _send(self, spans: Sequence[Span]) -> None:
        if self._sender is None:
            self._sender = _Sender(self._resource, self._offset_ns)
        self._has_failed = not self._sender.send(spans)
        if self._has_failed and not self._is_told:
            self._is_told = True
            self._say(f"traces can't be sent to {self._sender.endpoint}: these spans are lost")


class _Sender:
    """The SDK's part: imported here, because it takes half a second."""

    def __init__(self, resource: Mapping[str, str | int], offset_ns: int) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # one line of ours says it once
        self._offset_ns = offset_ns
        self._exporter: SpanExporter = OTLPSpanExporter()
        self.endpoint: str = getattr(self._exporter, "_endpoint", "the collector")
        self._finished: InMemorySpanExporter = InMemorySpanExporter()
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create(dict(resource)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._open: tuple[int, OpenSpan] | None = None
        """Number and span of the cycle whose spans come now."""

    def send(self, spans: Sequence[Span]) -> bool:
        """Send these, as children of their cycle's. Return False if they were lost."""
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        tracer = self._provider.get_tracer("megatron_ft", megatron_ft.__version__)
        for each in spans:
            if self._open is None or self._open[0] != each.cycle:
                parent = tracer.start_span(CYCLE, start_time=each.cycle_begin_ns + self._offset_ns)
                self._open = each.cycle, parent
            _, parent = self._open
            if each.name == CYCLE:
                parent.set_attributes(each.attributes)
                if each.error:
                    parent.set_status(Status(StatusCode.ERROR, each.error))
                parent.end(each.end_ns + self._offset_ns)
                self._open = None
                continue
            span = tracer.start_span(
                each.name,
                context=set_span_in_context(parent),
                start_time=each.begin_ns + self._offset_ns,
                attributes=each.attributes,
            )
            if each.error:
                span.set_status(Status(StatusCode.ERROR, each.error))
            span.end(each.end_ns + self._offset_ns)
        finished = self._finished.get_finished_spans()
        self._finished.clear()
        return not finished or self._exporter.export(finished) is SpanExportResult.SUCCESS
