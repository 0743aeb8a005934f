"""Runs that are over, under other timeouts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_ft.cli.analysis.replay import Replayed
from megatron_ft.cli.main import main
from megatron_ft.cli.replay import suggestion
from megatron_ft.core.config.config import parse_section_timeouts
from tests.support.generated_logs import END, START, Fault, GeneratedJob, write_job
from tests.unit.cli.analysis.test_report_cycles import Logs
from tests.unit.cli.analysis.test_report_timeline import told

STEP, SAVE = 0, 1


def write_steps(directory: Path, lengths_s: list[float], *, save_every: int = 20) -> None:
    """A rank with these steps, one after the other, and a short save after each so many."""
    events: list[tuple[float, int, int]] = []
    at = 3.0
    for number, length_s in enumerate(lengths_s, 1):
        events += [(at, START, STEP), (at + length_s, END, STEP)]
        at += length_s + 0.001
        if number % save_every == 0:
            events += [(at, START, SAVE), (at + 0.1, END, SAVE)]
            at += 0.101
    attached = (2.0, "attached", {"rank": 0, "cycle": 0, "pid": 1})
    Logs(directory).write("monitor", attached, *told(0, 0, 2.0, *events, names=("step", "checkpointing")))


def replayed(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> str:
    assert main(["replay", str(directory), *options]) == 0
    return capsys.readouterr().out


def test_a_timeout_below_a_healthy_step_would_have_ended_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, [1.0] * 30 + [9.0] + [1.0] * 10)
    out = replayed(capsys, tmp_path, "--timeouts", "step:8")
    assert "wrongly: cycle 0, rank 0: 'step' took 9.00 s, the timeout would have been 8.00 s" in out
    assert "1 restart without cause; these logs have no restart to estimate the cost from" in out
    out = replayed(capsys, tmp_path, "--timeouts", "step:10")
    assert "wrongly" not in out
    assert "no healthy rank would have been terminated" in out


def test_a_rule_learns_at_each_save_and_judges_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # the first long step is before the first save, where nothing is judged; the last one is above all that was learned
    write_steps(tmp_path, [1.0] * 10 + [30.0] + [1.0] * 40 + [200.0] + [1.0] * 10)
    out = replayed(capsys, tmp_path, "--rule", "reference")
    assert "'step' took 200.00 s, the timeout would have been 150.00 s" in out
    assert "too early to judge" in out
    assert replayed(capsys, tmp_path, "--rule", "ours").startswith("rule budget")
    both = replayed(capsys, tmp_path)
    assert "rule budget" in both
    assert "rule reference" in both


def test_a_hang_would_have_been_noticed_sooner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, GeneratedJob(ranks=2, faults=(Fault(cycle=0, rank=1, iteration=30),)))
    out = replayed(capsys, tmp_path, "--timeouts", "step:2,out_of_section:60")
    assert "'step' was detected after 5.00 s, and would have been after 2.00 s: 3.00 s sooner" in out
    out = replayed(capsys, tmp_path, "--timeouts", "step:7.5")
    assert "2.50 s later" in out


def test_a_picture_is_drawn_also_of_a_section_that_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, [1.0] * 30 + [9.0] + [1.0] * 10, save_every=1000)
    picture = tmp_path / "picture.png"
    assert f"wrote {picture}" in replayed(capsys, tmp_path, "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["replay", str(tmp_path), "--png", str(tmp_path / "missing" / "picture.png")]) == 2
    assert "can't be written: No such file or directory" in capsys.readouterr().err


def test_suggested_timeouts_can_be_pasted_into_file_and_command_line() -> None:
    timeouts = {"setup": 10.34, "step": 5.0, "write shards": 0.0512, "never": None, "(out of section)": 301.2}
    counts = {"setup": 1, "step": 250, "write shards": 100, "never": 700, "(out of section)": 100}
    found = [Replayed(name=name, judged=counts[name], last_s=last_s) for name, last_s in timeouts.items()]
    lines = suggestion("budget", found)
    assert lines[0] == "# by the rule budget"
    assert "    write shards: 0.052  # from 100 intervals" in lines
    assert "    # setup: 11  # from 1 interval, too few: choose a longer one" in lines
    at = lines.index("")
    assert yaml.safe_load("\n".join(lines[:at])) == {
        "fault_tolerance": {
            "rank_section_timeouts": {"step": 5, "write shards": 0.052},
            "rank_out_of_section_timeout": 310,
        }
    }
    sections, out = shlex.split(lines[-1])
    assert out == "--ft-rank-out-of-section-timeout=310"
    assert parse_section_timeouts(sections.partition("=")[2]) == {"step": 5, "write shards": 0.052}
    few = suggestion(
        "budget",
        [Replayed(name="step", judged=99, last_s=5.0), Replayed(name="(out of section)", judged=200, last_s=9.0)],
    )
    assert yaml.safe_load("\n".join(few[:-2])) == {"fault_tolerance": {"rank_out_of_section_timeout": 9}}
    assert few[-1] == "--ft-rank-out-of-section-timeout=9"
    nothing = suggestion("budget", [Replayed(name="step", unjudged=100)])
    assert nothing == ["# nothing could be learned from these logs"]


def test_suggestion_needs_a_hundred_intervals_and_names_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, enough = tmp_path / "few", tmp_path / "enough"
    few.mkdir()
    enough.mkdir()
    write_steps(few, [1.0] * 80)
    write_steps(enough, [1.0] * 120)
    assert main(["replay", str(few), "--suggest"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "no section has 100 intervals in these logs (the most is 8" in line
    out = replayed(capsys, enough, "--suggest", "--rule", "reference")
    assert "# by the rule reference\n" in out
    assert re.search(r"^    step: \S+  # from 120 intervals$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--timeouts", "stp:8"), "['stp'] aren't in these logs"),
        (("--timeouts", ""), "must be NAME:SECONDS"),
        (("--timeouts", "step"), "must be NAME:SECONDS"),
        (("--timeouts", "out_of_section:1,out_of_section:2"), "each name once"),
        (("--rule", "mine"), "invalid choice"),
        (("--safety-factor", "0"), "safety_factor"),
        (("--safety-factor", "x"), "is no number"),
        (("--suggest", "--timeouts", "step:8"), "learned from the logs"),
    ],
)
def test_mistakes_are_one_line(
    options: tuple[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, [1.0] * 5)
    assert main(["replay", str(tmp_path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_replay_of_a_directory_without_logs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "no event logs in" in capsys.readouterr().err
