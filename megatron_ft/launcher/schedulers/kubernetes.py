"""Kubernetes: an indexed Job calls its pods NAME-INDEX, and a headless service is their domain."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace

from megatron_ft.config.torchrun import DEFAULT_PORT
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment
from megatron_ft.link.base.wording import printable
from megatron_ft.link.file_queue import bounded_call

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
_TERMINATION_LOG = "/dev/termination-log"
_MOST_BYTES = 4000
"""Limit below the 4096 bytes that Kubernetes reads."""


def detect(environ: Mapping[str, str], *, full_name: str, is_asked: bool) -> SchedulerEnvironment | None:
    """Return the facts of a pod; None if this is none, unless ``--scheduler`` says so."""
    index = environ.get(INDEX_VARIABLE)
    if index is None and not environ.get("KUBERNETES_SERVICE_HOST") and not is_asked:
        return None
    # 0 is the end of the training, but a pod whose node is drained has more to do
    known = SchedulerEnvironment(
        scheduler="kubernetes",
        job="a pod",
        stopped_code=128 + signal.SIGTERM,
        are_pods=True,
    )
    host, _, domain = full_name.partition(".")
    pod = re.fullmatch(r"(.+)-(\d+)", host)
    if pod is None or pod[2] != index:
        return known
    return replace(
        known,
        job=f"pod {index} of {pod[1]}",
        life=pod[1],
        run_id=pod[1],
        endpoint=f"{pod[1]}-0.{domain}:{DEFAULT_PORT}" if domain else "",
    )


def rank_variable(*_of_the_job: object) -> str:
    """Return the variable that differs for each launcher."""
    return INDEX_VARIABLE


def requeue(*_of_the_job: object) -> None:
    """Do nothing: the Job starts pods again by their exit code."""


def write_reason(text: str, *, path: str = _TERMINATION_LOG) -> None:
    """Write why this container ended, in a sentence, to its termination log, if both exist."""

    def write() -> None:
        try:
            with open(path, "r+b") as file:
                file.truncate()
                file.write(printable(text).encode(errors="replace")[:_MOST_BYTES])
        except OSError:
            pass  # another path is configured, or none

    if text:
        bounded_call(write, None)
