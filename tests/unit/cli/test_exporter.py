"""`megatron-ft exporter`: a job as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ft.cli import exporter
from megatron_ft.cli.analysis.analysis import analyze
from megatron_ft.cli.logs.runs import runs_in
from megatron_ft.cli.main import main
from tests.support.generated_logs import Fault, GeneratedJob, write_job


def test_tensorboard_files_hold_goodput_step_times_and_the_ends_of_cycles(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logs, board = tmp_path / "logs", tmp_path / "board"
    logs.mkdir()
    write_job(logs, GeneratedJob(ranks=2, steps=400, faults=(Fault(cycle=0, rank=1, iteration=130),)))
    assert main(["exporter", str(logs), "--once", "--tensorboard", str(board)]) == 0
    found = accumulator.EventAccumulator(str(board))
    found.Reload()
    (goodput,) = found.Tensors("megatron_ft/goodput")
    assert goodput.step == 399
    steps = [each.step for each in found.Tensors("megatron_ft/step_s/median")]
    assert steps == sorted(steps)
    assert len(steps) >= 2
    texts = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("megatron_ft/cycles")]
    assert texts[0].startswith("cycle 0 ended: rank 1 hung in 'step'")
    assert texts[1] == "cycle 1 ended: succeeded"


def test_second_reading_writes_only_what_is_new(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_job(tmp_path, GeneratedJob(ranks=2, steps=400, faults=(Fault(cycle=0, rank=1, iteration=130),)))
    written: list[str] = []
    writer = SimpleNamespace(add_event=lambda event: written.append(event.summary.value[0].tag))
    (run,) = runs_in([str(tmp_path)])
    upto = exporter._write(writer, analyze(run), -1.0, 0)
    first = {*written}
    written.clear()
    assert exporter._write(writer, analyze(run), *upto) == upto
    assert first - {*written} == {"megatron_ft/cycles", "megatron_ft/step_s/median", "megatron_ft/step_s/slowest_rank"}
