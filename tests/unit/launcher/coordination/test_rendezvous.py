"""The store for the ranks of a cycle, and the rendezvous that hands out what the coordinator has decided."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, registry
from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.launcher.coordination import rendezvous
from megatron_ft.launcher.coordination.rendezvous import CoordinatedRendezvous, RankStoreError
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a log directory there with each `LaunchConfig`, and leaves it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        return int(sock.getsockname()[1])


def launchers(host: str = HERE, port: int = 0) -> CoordinatedRendezvous:
    """One launcher's."""
    return CoordinatedRendezvous(LaunchConfig(1, 2, 1, run_id="run"), host, port)


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((HERE, port)) == 0


@pytest.fixture
def served() -> Iterator[CoordinatedRendezvous]:
    store = launchers()
    yield store
    store.close_store()


def test_store_of_a_new_cycle_is_fresh_and_the_old_one_is_closed(served: CoordinatedRendezvous) -> None:
    first = served.open_store()
    mine, other = served.connect(first), launchers().connect(first)
    other.set("who", "other")
    assert mine.get("who") == b"other"
    second = served.open_store()
    assert not served.connect(second).check(["who"])
    assert not is_listening(port_of(first)), "its port is given back, though a client of it is still there"
    with pytest.raises(RuntimeError):
        other.check(["who"])


def test_a_port_of_the_users_is_that_of_each_cycle() -> None:
    port = free_port()
    store = launchers(port=port)
    clients = []
    for _ in range(3):
        address = store.open_store()
        assert address == f"{HERE}:{port}"
        clients.append(store.connect(address))
        assert not clients[-1].check(["key"])
        clients[-1].set("key", "value")
    with pytest.raises(RankStoreError, match=f"port {port}: [^\n]+$"):
        launchers(port=port).open_store()
    store.close_store()
    assert not is_listening(port)
    store.close_store()


@pytest.mark.parametrize(("local_addr", "written"), [("nobody.invalid", "nobody.invalid"), ("fe80::1", "[fe80::1]")])
def test_place_0_needs_no_name_server_to_reach_itself(local_addr: str, written: str) -> None:
    store = launchers(local_addr)
    address = store.open_store()
    assert address == f"{written}:{port_of(address)}"
    store.connect(address).set("key", "value")
    store.close_store()


def test_a_store_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.5)
    address = f"{HERE}:{free_port()}"
    with pytest.raises(RankStoreError, match=f"{address}, can't be reached: [^\n]+$") as caught:
        launchers().connect(address)
    assert isinstance(caught.value, RendezvousConnectionError), "as torch's agent expects it"


def test_a_store_that_no_launcher_can_name_is_not_looked_for() -> None:
    with pytest.raises(RankStoreError, match="was lost with node 0's launcher"):
        launchers().connect("")


def test_frames_of_torchs_own_code_are_not_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("no\x1b\nframe #0: c10d")

    monkeypatch.setattr(rendezvous, "TCPStore", refuse)
    for act in (launchers().open_store, lambda: launchers().connect("a:1")):
        with pytest.raises(RankStoreError) as caught:
            act()
        assert str(caught.value).isprintable()
        assert "frame" not in str(caught.value)


def test_closing_the_store_ends_a_wait_in_it(served: CoordinatedRendezvous) -> None:
    client = served.connect(served.open_store())
    client.set("waits", "")
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            client.get("never")
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    served.close_store()
    assert ended.wait(10)


def cycle(number: int, *, place: int, world: int, store: str) -> Assignment:
    decision = Decision(number, "word.number", DecisionKind.START, number, world)
    return Assignment(decision, place=place, store=store)


def made_by_torch(config: LaunchConfig) -> Any:
    """Return the handler that torch's launcher gets for this configuration."""
    return registry.get_rendezvous_handler(
        RendezvousParameters(config.rdzv_backend, "", "run", 1, 2, **config.rdzv_configs)
    )


def test_the_rendezvous_hands_out_what_was_decided(served: CoordinatedRendezvous) -> None:
    handlers = [served, launchers()]
    for number in range(2):
        address = served.open_store()
        infos = []
        for place, handler in enumerate(handlers):
            handler.orders = CoordinatorView()
            handler.orders.begun = cycle(number, place=place, world=2, store=address)
            infos.append(handler.next_rendezvous())
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        for info in infos:
            assert (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) == (
                HERE,
                port_of(address),
            )
        assert not infos[1].store.check(["key"])
        infos[0].store.set("key", "value")
        assert infos[1].store.get("key") == b"value"
    assert served.use_agent_store
    assert not served.is_closed()
    assert served.num_nodes_waiting() == 0
    assert served.shutdown()


def test_each_launch_in_one_process_has_its_own_rendezvous_and_torch_logs_no_password() -> None:
    for _ in range(2):
        config = LaunchConfig(1, 2, 1, run_id="run", rdzv_configs={"password": "secret"})
        handler = CoordinatedRendezvous(config, HERE)
        assert made_by_torch(config) is handler
        assert handler.get_run_id() == "run"
        assert "secret" not in str(config.rdzv_configs)
