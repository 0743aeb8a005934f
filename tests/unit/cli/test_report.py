"""`megatron-ft report`: what is printed and written; nothing in a text from a log is obeyed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ft.cli import main
from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import split_runs
from megatron_ft.cli.render import report_tables
from tests.support.generated_logs import Fault, GeneratedJob, write_job
from tests.unit.cli.analysis.test_report_cycles import Logs, ended, started
from tests.unit.cli.analysis.test_report_timeline import only

HANG = Fault(cycle=0, rank=2, iteration=33)
NASTY = ("setup", "</script><b>$x_1$", "[red]save[/red]", "<img src=http://evil/x>")


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    write_job(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,)))
    return tmp_path


def test_json_is_all_of_stdout(hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(hung), "--json", "--html", str(tmp_path / "t")]) == 0
    captured = capsys.readouterr()
    (run,) = json.loads(captured.out)
    assert f"wrote {tmp_path / 't'}" in captured.err
    assert run["goodput"]["iterations"] == 60
    assert [cycle["kind"] for cycle in run["cycles"]] == ["hang", None]
    assert run["cycles"][0]["phases_s"]["stop"] > 0
    assert run["cycles"][0]["findings"] == ["rank 2 stopped first; 3 others wait in all_reduce"]
    assert run["cycles"][0]["evidence"][0]["file"].startswith("evidence/cycle0/rank2-cycle0")
    assert run["timeouts"][1]["name"] == "step"
    assert run["timeouts"][1]["margin"] == pytest.approx(5.0 / run["timeouts"][1]["longest_s"])


def test_last_of_several_runs_is_drawn_unless_another_is_chosen(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Logs(tmp_path, run_id="again", wall_offset=1_800_000_000 * 10**9)
    again.write("launcher", (1.0, "cycle_started", started(0, 0)))
    assert len(split_runs(read_directory(hung))) == 2
    page = tmp_path / "out.html"
    assert main.main(["report", str(hung), "--html", str(page)]) == 0
    assert "job again: " in page.read_text()
    capsys.readouterr()
    assert main.main(["report", str(hung), "--html", str(page), "--run", "1", "--json"]) == 0
    assert "job generated: " in page.read_text()
    (run,) = json.loads(capsys.readouterr().out)
    assert run["run_id"] == "generated"
    assert main.main(["report", str(hung), "--run", "3"]) == 2
    assert "--run 3: there are 2 runs" in capsys.readouterr().err


def test_a_terminal_gets_no_order_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(tmp_path)
    end = ended(0, "crash", 0, "a\x1b[2Jb\rc\x07d\u202ee\nsecond\x9bline", None)
    logs.write("launcher", (1.0, "cycle_started", started(0, 0)), (2.0, "cycle_ended", end))
    report_tables.print_report(only(tmp_path))
    text = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in text)
    assert r"a\x1b[2Jb c\x07d\u202ee " in text
    assert r" second\x9bline " in text


def test_a_name_of_a_section_is_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("setup", "step", "[/red]", "\x1b[31mred")
    fault = Fault(cycle=0, rank=0, iteration=25)
    write_job(tmp_path, GeneratedJob(ranks=2, steps=30, faults=(fault,), sections=names))
    report_tables.print_report(only(tmp_path))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "│ [/red] " in text
    assert r"│ \x1b[31mred " in text
