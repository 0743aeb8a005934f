"""Training runs that only call the hooks, with a client that records and with a real one on a board."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import RankMonitorClientError
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.board import Board, create_memory
from megatron_ft.rank.base.connection import MonitorWelcome
from megatron_ft.rank.client import client as client_module
from megatron_ft.rank.hooks.hook_order import HookOrder
from tests.support.launching import wait_until

ALL = {"setup", "step", "checkpointing", "out_of_section"}


class FakeClient:
    """Any client: records its calls, keeps the rules of sections, observes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.open: list[str] = []
        self.is_initialized = False
        self.num_warmup_iters: int | None = None
        self.loaded: Any = None
        self.state = {"anything": 1}
        self.calculation_error: Exception | None = None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        self.is_initialized = True
        self.num_warmup_iters = num_warmup_iters

    def start_section(self, section: str) -> None:
        if section in self.open:
            raise RankMonitorClientError(f"section {section!r} is already open")
        self.open.append(section)
        self.calls.append(("start", section))

    def end_section(self, section: str) -> None:
        if section not in self.open:
            raise RankMonitorClientError(f"section {section!r} is already closed")
        self.open.remove(section)
        self.calls.append(("end", section))

    def end_all_sections(self) -> None:
        for section in list(reversed(self.open)):
            self.end_section(section)

    def set_iteration(self, n: int) -> None:
        self.calls.append(("iteration", n))

    def calculate_and_set_section_timeouts(self, selected_sections: list[str], calc_out_of_section: bool) -> bool:
        if self.calculation_error is not None:
            raise self.calculation_error
        self.calls.append(("calculate", selected_sections, calc_out_of_section))
        return True

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state

    def send_workload_control_request(self, request: Any) -> None:
        self.calls.append(("request", request))

    def shutdown_workload_monitoring(self) -> None:
        self.is_initialized = False
        self.calls.append(("shutdown",))

    def calculations(self) -> list[tuple[list[str], bool]]:
        return [(c[1], c[2]) for c in self.calls if c[0] == "calculate"]

    def sections(self) -> list[tuple[str, str]]:
        return [(c[0], c[1]) for c in self.calls if c[0] in ("start", "end")]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FT_CYCLE", "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """What ``setup`` will create."""
    fake = FakeClient()
    monkeypatch.setattr("megatron_ft.fault_tolerance.RankMonitorClient", lambda: fake)
    monkeypatch.setattr("megatron_ft.rank.hooks.hook_order.order", HookOrder())
    return fake


def new_state(tmp_path: Path, **settings: Any) -> ft.GlobalState:
    async_save = settings.pop("async_save", False)
    return ft.GlobalState.create(
        save=str(tmp_path / "ckpt"), async_save=async_save, ft=ft.FaultToleranceSettings(**settings)
    )


def start(tmp_path: Path, **settings: Any) -> ft.GlobalState:
    state = new_state(tmp_path, **settings)
    ft.setup(state.cfg, state)
    return state


def train(state: ft.GlobalState, steps: int) -> None:
    for _ in range(steps):
        ft.on_training_step_start(state)
        ft.on_training_step_end(state)
        assert state.train_state is not None
        state.train_state.step += 1


def evaluate(state: ft.GlobalState, steps: int) -> None:
    for _ in range(steps):
        ft.on_eval_step_start(state)
        ft.on_eval_step_end(state)


def save_checkpoint(state: ft.GlobalState, is_async_finalization: bool = False) -> None:
    ft.on_checkpointing_start(state)
    ft.on_checkpointing_end(is_async_finalization=is_async_finalization, global_state=state)


def all_hooks(state: Any) -> None:
    ft.on_training_step_start(state)
    ft.on_training_step_end(state)
    ft.on_eval_step_start(state)
    ft.on_eval_step_end(state)
    ft.on_checkpointing_start(state)
    ft.on_checkpointing_end(False, state)
    ft.on_checkpoint_loaded(False, state)


def learning_run(tmp_path: Path, client: FakeClient, *, saves: int = 1) -> ft.GlobalState:
    state = start(tmp_path, calc_ft_timeouts=True)
    ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
    train(state, 16)
    for _ in range(saves):
        save_checkpoint(state)
    return state


class Bench:
    """Starts runs with a real client; the monitor's part of the hello is played here."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path = tmp_path
        self._monitors_ends: list[socket.socket] = []
        self.config = FaultToleranceConfig()
        self.boards: list[Board] = []
        self.hellos: list[dict[str, Any]] = []
        monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", str(tmp_path / "socket"))
        monkeypatch.setattr(client_module, "say_hello", self._welcome)
        monkeypatch.setattr("megatron_ft.rank.hooks.hook_order.order", HookOrder())  # as in a new process

    def _welcome(self, info: Any, warmup_iterations: int, **hello: Any) -> MonitorWelcome:
        fd = create_memory()
        board = Board(fd)
        self.boards.append(Board(fd))
        self.hellos.append(hello)
        os.close(fd)
        config = FaultToleranceConfig.from_dict(self.config.to_dict())
        board.initialise(
            cycle=info.cycle,
            rank=info.global_rank,
            pid=info.pid,
            start_ns=time.monotonic_ns(),
            warmup_iterations=warmup_iterations,
            initial_heartbeat=config.initial_rank_heartbeat_timeout,
            heartbeat=config.rank_heartbeat_timeout,
            sections=config.rank_section_timeouts,
            out_of_section=config.rank_out_of_section_timeout,
        )
        logs = self.tmp_path / "logs"
        logs.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._monitors_ends.append(ours)
        fds = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), os.memfd_create("stacks"), theirs.detach())
        return MonitorWelcome(config, board, *fds, str(logs), "run")

    def start(self, **settings: Any) -> ft.GlobalState:
        return start(self.tmp_path, **settings)

    def seen(self) -> BoardSnapshot:
        """Reading of the newest board, as its monitor has it."""
        return self.boards[-1].snapshot()

    def events(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Records of that name, once there are so many: logs are written by threads of their own."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(self._events(name)) >= count, 10.0)
        return self._events(name)

    def _events(self, name: str) -> list[dict[str, Any]]:
        records = [
            json.loads(line)
            for path in (self.tmp_path / "logs").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return [record for record in records if record["ev"] == name]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)
