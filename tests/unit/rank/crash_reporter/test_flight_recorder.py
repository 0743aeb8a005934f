"""What torch's flight recorder says, shortened: entries as it writes them."""

from __future__ import annotations

from typing import Any

from megatron_ft.diagnosis.collectives import Collectives
from megatron_ft.rank.crash_reporter.flight_recorder import digest


def entry(op: str, seq: int, *, group: str = "0", done: bool = True, p2p: bool = False, **more: Any) -> dict[str, Any]:
    """One of torch's, as far as it is read."""
    return {
        "process_group": [group, "undefined"],
        "profiling_name": op,
        "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0,
        "is_p2p": p2p,
        "retired": done,
        "state": "scheduled",
        "input_sizes": [[4]],
        **more,
    }


def names(answer: Collectives) -> list[str]:
    return [f"{each.backend}:{each.op} {each.seq}" for each in answer.in_flight]


def test_digest_lists_collectives_in_flight_and_counts_of_each_group() -> None:
    answer = digest(
        [
            entry("gloo:all_reduce", 1),
            entry("gloo:barrier", 2),
            entry("gloo:all_reduce", 1, group="tp"),
            entry("gloo:all_gather", 3, done=False),
            entry("nccl:all_reduce", 7, done=False, state="completed"),
        ]
    )
    assert names(answer) == ["gloo:all_gather 3"]
    assert answer.enqueued == {"gloo/0": 3, "gloo/tp": 1, "nccl/0": 7}
    assert answer.completed == {"gloo/0": 2, "gloo/tp": 1, "nccl/0": 7}


def test_the_parts_of_a_batch_are_over_with_what_follows_them() -> None:
    parts = [entry("nccl:send 0->1", 1, p2p=True, done=False), entry("nccl:recv 0<-1", 2, p2p=True, done=False)]
    assert len(digest(parts).in_flight) == 2
    assert digest([*parts, entry("nccl:coalesced", 2, p2p=True)]).in_flight == ()
    # gloo's are retired each by itself, in any order
    send = entry("gloo:send 0->1", 1, p2p=True, done=False)
    assert names(digest([send, entry("gloo:recv 0<-1", 1, p2p=True)])) == ["gloo:send 0->1 1"]
