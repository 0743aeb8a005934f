"""torch's rendezvous made quicker, and left alone where this torch isn't the one that the launcher knows."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from megatron_ft.core.gathering import Seen, Verdict
from megatron_ft.core.membership import Waiting
from megatron_ft.launcher import torch_rendezvous
from megatron_ft.launcher.torch_rendezvous import Pace, dynamic_rendezvous
from tests.support.launching import wait_until

PACE = Pace(nodes=3, ends_last_call=True, removes_dead=True)


def handler(store: Any, *, min_nodes: int = 1, max_nodes: int = 3) -> Any:
    backend = C10dRendezvousBackend(store, "job")
    timeout = RendezvousTimeout(timedelta(seconds=60), last_call=timedelta(seconds=60))
    return DynamicRendezvousHandler.from_backend("job", store, backend, min_nodes, max_nodes, "here", timeout)


@pytest.fixture
def store() -> Any:
    made = HashStore()
    made.set_timeout(timedelta(seconds=20))
    return made


def participants(one: Any) -> int:
    state = one._state_holder
    state.sync()
    return len(state.state.participants)


def joins(*ones: Any) -> None:
    """Through torch's own operation: all of them in one round."""
    join = dynamic_rendezvous._RendezvousJoinOp()
    threads = [
        threading.Thread(target=lambda one=one: one._op_executor.run(join, time.monotonic() + 30), daemon=True)
        for one in ones
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def nothing(_seen: Seen) -> Verdict:
    return Verdict()


def test_this_torch_is_known(store: Any) -> None:
    assert torch_rendezvous.slow_because(handler(store)) is None


@pytest.mark.parametrize("name", ["_delay", "get_method_name"])
def test_torch_without_a_name_is_left_as_it_is(store: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = handler(store)
    monkeypatch.delattr(dynamic_rendezvous, name)
    warning = torch_rendezvous.slow_because(one)
    assert warning is not None
    assert f"has no dynamic_rendezvous.{name}: the nodes meet at torch's own pace" in warning
    before = dict(vars(dynamic_rendezvous)), dict(vars(one._state_holder))
    with torch_rendezvous.quick_round(one, pace=PACE, look=nothing):
        assert (dict(vars(dynamic_rendezvous)), dict(vars(one._state_holder))) == before
    assert torch_rendezvous.last_round(one) == (0, {})


@pytest.mark.parametrize(
    ("where", "name"), [("_state_holder", "_cache_duration"), ("_state", "wait_list"), ("_state", "last_heartbeats")]
)
def test_torch_that_keeps_its_state_otherwise_is_left_as_it_is(store: Any, where: str, name: str) -> None:
    one = handler(store)
    delattr(one._state_holder if where == "_state_holder" else one._state_holder._state, name)
    assert name in (torch_rendezvous.slow_because(one) or "")
    with torch_rendezvous.quick_round(one, pace=PACE, look=nothing):
        assert "sync" not in vars(one._state_holder)


def test_rendezvous_of_another_kind_is_none_of_ours() -> None:
    assert torch_rendezvous.slow_because(object()) is None
    with torch_rendezvous.quick_round(object(), pace=PACE, look=nothing):
        pass


def test_round_is_quick_and_nothing_stays_behind(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = handler(store)
    holder = one._state_holder
    before = dict(vars(dynamic_rendezvous)), {**vars(holder)}.keys(), holder._cache_duration
    delays: list[float] = []
    monkeypatch.setattr(torch_rendezvous.time, "sleep", delays.append)
    with torch_rendezvous.quick_round(one, pace=PACE, look=nothing):
        assert holder._cache_duration == 0
        dynamic_rendezvous._delay(seconds=1)
        dynamic_rendezvous._delay(seconds=(0, 0.3))
        assert dynamic_rendezvous.get_method_name()
        assert holder.sync() is None
    assert 0 < delays[0] < 0.03
    assert 0 <= delays[1] < 0.01
    assert (dict(vars(dynamic_rendezvous)), {**vars(holder)}.keys(), holder._cache_duration) == before


def test_last_call_ends_when_nobody_else_comes(store: Any) -> None:
    one = handler(store)

    def look(seen: Seen) -> Verdict:
        return Verdict(ends_last_call=seen.me in seen.participants)

    with torch_rendezvous.quick_round(one, pace=PACE, look=look):
        joins(one)  # with torch's last call of 60 s this wouldn't end in time
    assert torch_rendezvous.last_round(one) == (0, {one._this_node: 0})


def test_dead_node_is_taken_out_and_the_next_round_begins(store: Any) -> None:
    one, other = handler(store, min_nodes=1, max_nodes=2), handler(store, min_nodes=1, max_nodes=2)
    joins(one, other)
    assert participants(one) == 2

    def look(seen: Seen) -> Verdict:
        return Verdict(dead=frozenset({other._this_node}) & seen.beats.keys(), ends_last_call=True)

    with torch_rendezvous.quick_round(one, pace=PACE, look=look):
        one._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), time.monotonic() + 10)
        joins(one)
    assert torch_rendezvous.last_round(one) == (1, {one._this_node: 0})


def test_what_the_user_has_set_is_left_to_torch(store: Any) -> None:
    one, other = handler(store, max_nodes=2), handler(store, max_nodes=2)
    joins(one, other)

    def look(seen: Seen) -> Verdict:
        return Verdict(dead=frozenset({other._this_node}), ends_last_call=True)

    pace = Pace(nodes=2, ends_last_call=False, removes_dead=False)
    with torch_rendezvous.quick_round(one, pace=pace, look=look):
        one._state_holder.sync()
    assert set(one._state_holder.state.participants) == {one._this_node, other._this_node}


def test_who_waits_is_told_by_what_it_was(store: Any) -> None:
    first, second, third = (handler(store, min_nodes=2, max_nodes=2) for _ in range(3))
    joins(first, second)
    _, met = torch_rendezvous.last_round(first)
    assert torch_rendezvous.nodes_waiting(first, met) == Waiting()
    threads = [begin_to_join(third)]
    wait_until(lambda: torch_rendezvous.nodes_waiting(fresh(first), met) != Waiting(), 10)
    assert torch_rendezvous.nodes_waiting(first, met) == Waiting(spare=frozenset([third._this_node]))
    torch_rendezvous.leave_rendezvous(second)
    threads.append(begin_to_join(second))
    both = Waiting(returning=frozenset([second._this_node]), joining=frozenset([third._this_node]))
    wait_until(lambda: torch_rendezvous.nodes_waiting(fresh(first), met) == both, 10)
    first.set_closed()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_where_it_can_not_be_told_they_are_counted() -> None:
    class Other:
        def num_nodes_waiting(self) -> int:
            return 2

    assert torch_rendezvous.nodes_waiting(Other(), ["a"]) == Waiting(unknown=2)


def fresh(one: Any) -> Any:
    """With what is in the store now."""
    one._state_holder._cache_duration = 0
    return one


def begin_to_join(one: Any) -> threading.Thread:
    join = dynamic_rendezvous._RendezvousJoinOp()

    def wait() -> None:
        with contextlib.suppress(RendezvousClosedError):
            one._op_executor.run(join, time.monotonic() + 30)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
