"""Whether a rank makes progress, from two looks at it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ft.learning.progress import LEAST_BYTES, ProgressSample, is_file_wait, progress_between

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
LATER = replace(STILL, at_ns=1_000_000_000)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"events": 41}, "has called a hook"),
        ({"completed": {"gloo/0": 9}}, "has completed 1 collective"),
        ({"entered": {"gloo/0": 9, "gloo/tp": 2}}, "has entered 2 collectives"),
        ({"transferred": {100: 5_000_000 + LEAST_BYTES}}, "has read or written 0.1 MB"),
        ({"transferred": {100: 5_000_000, 101: 3_000_000}}, "has read or written 3.0 MB"),
        ({"cpu_ns": 900_000_000, "stacks": frozenset({HERE, THERE})}, "computes in train.py:9 step"),
        ({"starved_ns": 260_000_000}, "is kept waiting for a CPU"),
        ({"starved_ns": 240_000_000}, ""),
        ({}, ""),
        ({"transferred": {100: 5_000_000 + LEAST_BYTES - 1}}, ""),  # a log, metrics
        ({"stacks": frozenset({THERE})}, ""),  # it polls
        ({"cpu_ns": 990_000_000}, ""),  # it spins in C
        ({"cpu_ns": 300_000_000, "stacks": frozenset({THERE})}, ""),
        ({"cpu_ns": 990_000_000, "stacks": frozenset()}, ""),
        ({"transferred": {}}, ""),  # a data-loader worker has ended
    ],
)
def test_change_is_described_if_it_shows_progress(change: dict[str, object], told: str) -> None:
    assert progress_between(STILL, replace(LATER, **change)) == told  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["events", "entered", "completed", "transferred"])
def test_count_that_one_of_the_looks_lacks_is_no_progress(name: str) -> None:
    more = {"events": 99, "entered": {"gloo/0": 99}, "completed": {"gloo/0": 99}, "transferred": {100: 10**9}}
    unknown = replace(STILL, **{name: None})  # type: ignore[arg-type]
    assert progress_between(unknown, replace(LATER, **{name: more[name]})) == ""  # type: ignore[arg-type]
    assert progress_between(replace(STILL, **{name: more[name]}), replace(LATER, **{name: None})) == ""  # type: ignore[arg-type]


def test_a_thread_that_waits_for_its_file_system_in_both_looks_is_told_from_a_hang() -> None:
    before = replace(STILL, file_waits={7: "rpc_wait_bit_killable", 8: "io_schedule"})
    assert progress_between(before, replace(LATER, file_waits={7: "rpc_wait_bit_killable"})) == (
        "waits for its file system (in rpc_wait_bit_killable)"
    )
    assert progress_between(before, replace(LATER, file_waits={9: "io_schedule"})) == ""
    assert progress_between(STILL, replace(LATER, file_waits={7: "io_schedule"})) == ""


@pytest.mark.parametrize(
    ("functions", "is_file"),
    [
        (["folio_wait_bit_common", "fuse_get_req", "nfs4_lookup", "ptlrpc_set_wait"], True),
        (["futex_do_wait", "ep_poll", "do_poll", "pipe_read", "fuse_dev_do_read", "unix_wait"], False),
    ],
)
def test_kernel_functions_of_file_systems_are_told_from_other_waits(functions: list[str], is_file: bool) -> None:
    assert [name for name in functions if is_file_wait(name) is not is_file] == []
