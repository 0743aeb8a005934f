"""Which signals to the batch script are passed on to the launchers."""

from __future__ import annotations

import signal
import time
import types
from typing import Any

import pytest

from megatron_ft.cli.slurm import batch
from megatron_ft.cli.slurm.batch import Batch, Plan
from megatron_ft.cli.slurm.policy import Limits

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("signals", "command_s", "passed_on"),
    [
        ([(TERM, 0.0), (TERM, 0.01)], 0.1, [0.0]),
        ([(TERM, 0.0), (TERM, 0.01)], 20.0, [0.0]),  # the controller is slow to answer scancel
        ([(USR1, 0.0), (TERM, 6.0)], 0.1, [0.0, 6.0]),
        ([(TERM, 0.0), (TERM, 6.0)], 10.0, [0.0, 10.0]),
        ([(TERM, 0.0), (TERM, 6.0), (TERM, 12.0)], 0.1, [0.0, 6.0, 12.0]),
    ],
)
def test_a_second_request_is_passed_on_and_the_same_one_is_not(
    signals: list[tuple[signal.Signals, float]],
    command_s: float,
    passed_on: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(
        job="7",
        array="",
        nodes=2,
        limits=Limits(lives=9, failures=3, nodes=2),
        log_dir="logs",
        launcher=("ft_launcher",),
        srun_options=(),
        excludes_bad_nodes=False,
    )
    script = Batch(plan, {})
    now_s = 0.0
    commands: list[float] = []
    to_come = list(signals)

    def come_until(end_s: float) -> None:
        nonlocal now_s
        while to_come and to_come[0][1] <= end_s:
            number, now_s = to_come.pop(0)
            script._note(number, None)
        now_s = end_s

    def run_command(*_arguments: Any) -> None:
        commands.append(now_s)
        come_until(now_s + command_s)

    monkeypatch.setattr(batch, "time", types.SimpleNamespace(monotonic=lambda: now_s, strftime=time.strftime))
    monkeypatch.setattr(script, "_command", run_command)
    while to_come:
        come_until(max(now_s, to_come[0][1]))
        script._pass_on()
    script._pass_on()
    assert commands == passed_on
