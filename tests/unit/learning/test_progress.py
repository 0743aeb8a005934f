"""Whether a rank makes progress, from two looks at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_ft.learning.progress import LEAST_BYTES, ProgressSample, progress_between

HERE, THERE = ("train.py:9 step @4", "train.py:30 main @8"), ("train.py:9 step @6", "train.py:30 main @8")

STILL = ProgressSample(
    at_ns=0,
    events=40,
    entered={"gloo/0": 9},
    completed={"gloo/0": 8},
    stacks=frozenset({HERE}),
    frame="train.py:9 step",
    cpu_ns=0,
    transferred={100: 5_000_000},
)
MORE = {"events": 99, "entered": {"gloo/0": 99}, "completed": {"gloo/0": 99}, "transferred": {100: 10**9}}
WAITS = "waits for its file system (in rpc_wait_bit_killable)"
SERVER, DISK = {7: "rpc_wait_bit_killable"}, {8: "io_schedule"}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"events": 41}, "has called a hook"),
        ({}, {"entered": {"gloo/0": 9, "gloo/tp": 2}}, "has entered 2 collectives"),
        ({}, {"transferred": {100: 5_000_000 + LEAST_BYTES}}, "has read or written 0.1 MB"),
        ({}, {"cpu_ns": 900_000_000, "stacks": frozenset({HERE, THERE})}, "computes in train.py:9 step"),
        ({}, {"starved_ns": 260_000_000}, "is kept waiting for a CPU"),
        ({}, {}, ""),
        ({}, {"transferred": {100: 5_000_000 + LEAST_BYTES - 1}}, ""),  # a log, metrics
        ({}, {"stacks": frozenset({THERE})}, ""),  # it polls
        ({}, {"cpu_ns": 990_000_000}, ""),  # it spins in C
        ({}, {"transferred": {}}, ""),  # a data-loader worker has ended
        *[({name: None}, {name: more}, "") for name, more in MORE.items()],  # a look lacks this count
        *[({name: more}, {name: None}, "") for name, more in MORE.items()],
        ({"file_waits": {**SERVER, **DISK}}, {"file_waits": SERVER}, WAITS),
        ({"file_waits": SERVER}, {"file_waits": DISK}, ""),
    ],
)
def test_change_is_described_if_it_shows_progress(before: dict[str, Any], after: dict[str, Any], told: str) -> None:
    assert progress_between(replace(STILL, **before), replace(STILL, at_ns=1_000_000_000, **after)) == told
