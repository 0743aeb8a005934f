"""`megatron-ft exporter`: metrics of a job from its event logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from tests.support.generated_logs import Fault, GeneratedJob, write_job


def test_metrics_of_a_job_on_two_nodes_are_read_from_its_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, GeneratedJob(ranks=4, ranks_per_node=2, faults=(Fault(cycle=0, rank=3, iteration=30),)))
    assert main(["exporter", str(tmp_path), "--once"]) == 0
    shown = dict(line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    assert shown['megatron_ft_restarts_total{cause="hang"}'] == "1.0"
    assert shown['megatron_ft_timeout_seconds{section="step"}'] == "5.0"
    assert float(shown["megatron_ft_iteration"]) == 59
    ended = [name for name, value in shown.items() if 'state="ended"' in name and value == "1.0"]
    assert [name.split('"')[1] for name in ended] == ["node-0", "node-1"]


def test_goodput_and_sections_are_read_from_the_logs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, GeneratedJob(ranks=2, steps=200))
    assert main(["exporter", str(tmp_path), "--once"]) == 0
    shown = dict(line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    assert float(shown["megatron_ft_goodput_ratio"]) > 0.7
    assert float(shown['megatron_ft_time_seconds{class="checkpoint_save"}']) > 10
    assert float(shown['megatron_ft_section_seconds_count{section="step"}']) == 2 * 200


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


def test_directory_without_logs_has_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exporter", str(tmp_path), "--once"]) == 1
    assert capsys.readouterr().out == ""


def test_port_that_is_none_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exporter", str(tmp_path), "--port", "http"]) == 2
    assert "must be a port from 0 to 65535" in capsys.readouterr().err
