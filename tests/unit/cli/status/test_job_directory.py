"""`megatron-ft status JOB_DIR`: what is read, and what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main
from megatron_ft.job.rules.lives import Ending, Life, Lives
from tests.support.generated_logs import ITERATION, START
from tests.unit.cli.analysis.test_report_cycles import DAWN, Logs, ended, started
from tests.unit.cli.analysis.test_report_timeline import told


def write_job(directory: Path) -> None:
    """Two nodes; a cycle that crashed, and one that runs on both."""
    for number, host in enumerate(("node-2", "node-10")):
        steps = [of for step in range(2000) for of in ((20.0 + step, ITERATION, step), (20.5 + step, START, 0))]
        Logs(directory, host=host, wall_offset=DAWN).write(
            "launcher",
            (1.0, "cycle_started", {**started(0, number, 2), "group_rank": number}),
            (9.0, "cycle_ended", ended(0, "crash", 0, "rank 0 \x1b[2Jexited", 3)),
            (10.0, "cycle_started", {**started(1, number, 2), "group_rank": number}),
            *told(number, 1, 20.0, *steps),
        )


def test_status_of_a_job_directory_tells_of_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path)
    assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"job \S+: cycle 1 running for .* d .* h, 2 ranks, iteration 1999", lines[0])
    assert lines[1] == r"cycle 0 ended: rank 0 \x1b[2Jexited"
    assert [line.split()[:3] for line in lines[4:6]] == [["node-2", "0", "training"], ["node-10", "1", "training"]]
    assert re.fullmatch(r"newest record: .* ago \(ranks that call hooks are recorded every minute.*\)", lines[-1])


def test_json_of_a_job_directory_has_what_the_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "megatron_ft"  # where --log-dir was given
    logs.mkdir()
    write_job(logs)

    def shown(life: Life) -> dict[str, Any]:
        (logs / "result.json").write_text(Lives(lives=(life,)).to_text())
        assert main(["status", "--json", str(tmp_path)]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    cause = "its time was up"
    document = shown(Life(job="job", outcome=Ending.STOPPED, exit_code=0, ended="2999-01-01T00:00:00Z", cause=cause))
    assert (document["outcome"], document["cause"], document["cycle"]) == ("stopped", cause, 1)
    assert [row["state"] for row in document["nodes"]] == ["lost"] * 2
    assert document["log_dir"] == str(logs)
    # of an earlier life
    assert not shown(Life(job="job", outcome=Ending.FAILED, ended="1999-01-01T00:00:00Z"))[
        "is_over"
    ]  # of an earlier life


def test_status_of_an_empty_or_missing_directory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"megatron-ft: no event logs of a launcher in {tmp_path}\n"
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "can't be read: No such file or directory" in capsys.readouterr().err
