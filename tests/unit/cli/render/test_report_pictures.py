"""The trace, the JSON and the command line that writes them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli import main
from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import split_runs
from megatron_ft.cli.render import trace
from tests.support.generated_logs import Fault, GeneratedJob, write_job
from tests.unit.cli.analysis.test_report_cycles import Logs, started
from tests.unit.cli.analysis.test_report_timeline import only

HANG = Fault(cycle=0, rank=2, iteration=33)
NASTY = ("setup", "</script><b>$x_1$", "[red]save[/red]", "<img src=http://evil/x>")


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    write_job(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,)))
    return tmp_path


def trace_of(directory: Path) -> dict[str, Any]:
    path = directory / "out.trace"
    trace.write_trace(only(directory), str(path))
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


def test_the_trace_is_what_perfetto_reads(hung: Path) -> None:
    document = trace_of(hung)
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"cycles", *(f"rank {rank} (node-0)" for rank in range(4))}
    count = Counter(event["name"] for event in events if event.get("cat") == "section")
    assert count["step"] == 4 * (3 + 1)  # of a minute with few steps, and those that never ended
    assert count["checkpointing"] == 4 * 3
    minutes = [event["args"]["step"] for event in events if event["name"] == "minute" and "step" in event["args"]]
    assert sum(int(told.split(" ")[0]) for told in minutes) == 4 * (60 + 13)
    assert {event["name"] for event in events if event.get("cat") == "cycle"} == {"cycle 0", "cycle 1"}
    (verdict,) = [event for event in events if event.get("cat") == "verdict"]
    assert (verdict["pid"], verdict["ts"] > 1e6) == (2, True)


def test_spans_of_a_rank_lie_in_each_other_in_the_trace(hung: Path) -> None:
    """A viewer draws spans that overlap without one being inside the other as nonsense."""
    document = trace_of(hung)
    for rank in range(4):
        mine = [e for e in document["traceEvents"] if e.get("cat") == "section" and e["pid"] == rank]
        spans = sorted((e["ts"], -e["dur"]) for e in mine)
        ends: list[float] = []
        for begin, minus_length in spans:
            end = begin - minus_length
            while ends and ends[-1] <= begin + 0.2:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.2
            ends.append(end)


def test_terminal_report_shows_goodput_and_section_intervals(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(hung)]) == 0
    out = capsys.readouterr().out
    told = " ".join(out.split())
    assert "goodput 56.5% of 54.00 s, 60 iterations that counted, 13 done twice: productive step 30.50 s" in told
    assert "detection 5.00 s, restart 4.04 s, after the end 100 ms" in told
    (step,) = [line for line in out.splitlines() if line.startswith("│ step")]
    cells = [cell.strip() for cell in step.strip("│").split("│")]
    assert (cells[1], cells[6], cells[7]) == ("5.00 s", str(4 * 73), "1")
    assert cells[8] == "10.4 x"


def test_a_name_from_a_log_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, GeneratedJob(ranks=2, steps=30, faults=(HANG,), sections=NASTY))
    assert main.main(["report", str(tmp_path)]) == 0
    assert "[red]save[/red]" in capsys.readouterr().out


def test_json_is_all_of_stdout(hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(hung), "--json", "--trace", str(tmp_path / "t")]) == 0
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
    picture = str(tmp_path / "out.trace")
    assert main.main(["report", str(hung), "--trace", picture]) == 0
    assert json.loads(Path(picture).read_text())["otherData"]["run"] == "again"
    capsys.readouterr()
    assert main.main(["report", str(hung), "--trace", picture, "--run", "1", "--json"]) == 0
    assert json.loads(Path(picture).read_text())["otherData"]["run"] == "generated"
    (run,) = json.loads(capsys.readouterr().out)
    assert run["run_id"] == "generated"
    assert main.main(["report", str(hung), "--run", "3"]) == 2
    assert "--run 3: there are 2 runs" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written_is_one_line(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert main.main(["report", str(hung), option, str(tmp_path / "no" / "such")]) == 2
    err = capsys.readouterr().err
    assert "such can't be written: No such file or directory" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("share", [0.05, 0.3, 0.61, 0.9])
def test_outputs_are_written_for_logs_that_are_cut_off_anywhere(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    """A directory that is still written to, or was copied while it was."""
    whole = {path: path.read_bytes() for path in hung.glob("*.jsonl")}
    kept = {path: data[: int(len(data) * share)] for path, data in whole.items()}
    for path, data in kept.items():
        path.write_bytes(data)
    with_header = [data for data in kept.values() if b"\n" in data]
    assert with_header  # else there would be nothing to report
    for option in ("--html", "--trace"):
        file = tmp_path / f"out{option}"
        assert main.main(["report", str(hung), option, str(file)]) == 0
        assert file.stat().st_size > 1000
    capsys.readouterr()
    assert main.main(["report", str(hung), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    # the rest of a line that was cut off, and nothing else
    assert run["passed_over"] == sum(not data.endswith(b"\n") for data in with_header)
    assert len(run["cycles"]) == (1 if share < 0.6 else 2)
