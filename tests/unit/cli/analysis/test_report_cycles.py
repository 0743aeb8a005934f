"""From event logs on disk to the rows of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli import main
from megatron_ft.cli.analysis.analysis import analyze
from megatron_ft.cli.logs.read import parse_log, read_directory
from megatron_ft.cli.logs.runs import Run, split_runs
from megatron_ft.cli.render import report_tables
from megatron_ft.link.facts.launcher import CauseKind
from tests.support.arrived import line

S = 1_000_000_000
DAWN = 1_700_000_000 * S


class Logs:
    """Writes event logs as the processes of a run do; times are seconds on the host's monotonic clock."""

    def __init__(self, directory: Path, *, host: str = "node-a", run_id: str = "run", wall_offset: int = DAWN) -> None:
        self.directory = directory
        self.host = host
        self.run_id = run_id
        self.wall_offset = wall_offset
        self._number = 0

    def write(
        self, role: str, *records: tuple[float, str, dict[str, Any]], opened: float = 0.0, tail: str = ""
    ) -> Path:
        self._number += 1
        header = {
            "t": int(opened * S),
            "ev": "log_opened",
            "schema": 1,
            "role": role,
            "host": self.host,
            "pid": 100 + self._number,
            "run_id": self.run_id,
            "wall_ns": int(opened * S) + self.wall_offset,
        }
        lines = [header, *({"t": int(t * S), "ev": ev, **fields} for t, ev, fields in records)]
        path = self.directory / f"{role}-{self.host}-{self.run_id}-{self._number}-{int(opened)}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
        return path


def started(cycle: int, *ranks: int) -> dict[str, Any]:
    made = [{"rank": r, "local_rank": r, "pid": 10 + r} for r in ranks]
    return {"cycle": cycle, "ranks": made, "world_size": len(ranks)}


def ended(cycle: int, kind: str, rank: int, text: str, iteration: int | None = None) -> dict[str, Any]:
    cause = {"rank": rank, "kind": kind, "text": text, "section": "step" if kind == "hang" else ""}
    return {"cycle": cycle, "outcome": "failed", "cause": cause, "action": "restart", "iteration": iteration}


def first_iteration(rank: int, cycle: int, iteration: int, at: float) -> dict[str, Any]:
    return {"rank": rank, "cycle": cycle, "iteration": iteration, "at_ns": int(at * S)}


AGAIN = {"stop": 0.02, "ranks created": 0.06, "imports": 0.9, "set up": 2.0, "first step": 0.5}


def write_kill_then_hang(logs: Logs) -> None:
    """Rank 1 is killed at iteration 25, resumed from 20; rank 0 hangs at iteration 37, resumed from 30."""
    killed = {"type": "rank_killed", "rank": 1, "iteration": 25, "cycle": 0}
    hung = {"type": "rank_hung", "rank": 0, "iteration": 37, "cycle": 1}
    exited = {"cycle": 0, "rank": 1, "local_rank": 1, "pid": 11, "exitcode": -9, "signal": 9, "by_us": False}
    survivor = {"cycle": 0, "rank": 0, "local_rank": 0, "pid": 10, "exitcode": -9, "signal": 9, "by_us": True}
    ours = {"cycle": 1, "rank": 0, "local_rank": 0, "pid": 12, "exitcode": -9, "signal": 9, "by_us": True}
    verdict = {"cycle": 1, "rank": 1, "kind": "section", "section": "step", "iteration": 37}
    verdict |= {"timeout_s": 3.0, "elapsed_s": 3.0}
    logs.write(
        "launcher",
        (0.5, "cycle_started", started(0, 0, 1)),
        (10.02, "rank_exited", {**exited, "iteration": 25}),
        (10.03, "rank_exited", {**survivor, "iteration": 25}),
        (10.04, "cycle_ended", ended(0, "signal", 1, "rank 1 killed by SIGKILL (not sent by ft_launcher)", 25)),
        (10.10, "cycle_started", started(1, 0, 1)),
        (12.52, "training_again", {"cycle": 1, "seconds": AGAIN, "redone": 5}),
        (23.10, "rank_exited", {**ours, "iteration": 37}),
        (23.20, "cycle_ended", ended(1, "hang", 0, "rank 0 hung in 'step' for 3.0 s (timeout 3.0 s)", 37)),
        (23.30, "cycle_started", started(2, 0, 1)),
        (
            30.00,
            "cycle_ended",
            {"cycle": 2, "outcome": "succeeded", "cause": None, "action": "finish", "iteration": 59},
        ),
        (30.01, "run_ended", {"exit_code": 0}),
    )
    for rank in (0, 1):
        verdicts = [(23.01, "verdict", {**verdict, "since_ns": int(20.01 * S), "at_ns": int(23.01 * S)})]
        logs.write(
            "monitor",
            (1.0, "attached", {"rank": rank, "cycle": 0, "pid": 10 + rank}),
            (2.0, "first_iteration", first_iteration(rank, 0, 0, 1.5)),
            (10.02, "rank_gone", {"rank": rank, "cycle": 0, "pid": 10 + rank, "iteration": 25}),
            (11.0, "attached", {"rank": rank, "cycle": 1, "pid": 12 + rank}),
            (14.0, "first_iteration", first_iteration(rank, 1, 20, 12.0 + rank)),
            *(verdicts if rank == 1 else []),
            (23.1, "rank_gone", {"rank": rank, "cycle": 1, "pid": 12 + rank, "iteration": 37}),
            (24.0, "attached", {"rank": rank, "cycle": 2, "pid": 14 + rank}),
            (26.0, "first_iteration", first_iteration(rank, 2, 30, 25.0)),
            (29.9, "detached", {"rank": rank, "cycle": 2}),
            opened=0.4,
        )
    logs.write("rank", (10.00, "fault_injected", killed), opened=1.0)
    logs.write("rank", (20.00, "fault_injected", hung), opened=11.0)


def only_run(directory: Path) -> Run:
    (run,) = split_runs(read_directory(directory))
    return run


def test_restores_from_memory_are_counted_once_per_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = {"cycle": 0, "era": 0, "iteration": 25}
    for host in ("node-a", "node-b"):
        cycles = ((float(cycle + 1), "cycle_started", started(cycle, 0, 1)) for cycle in range(2))
        Logs(tmp_path, host=host).write("launcher", *cycles, (2.5, "snapshot_restored", {"cycle": 1, "key": key}))
    run = only_run(tmp_path)
    assert [cycle.restored for cycle in run.cycles] == [None, 25]
    report_tables.print_report(analyze(run))
    assert "1 cycle restored from memory." in capsys.readouterr().out


def test_kill_and_hang_are_reported_with_their_delays(tmp_path: Path) -> None:
    write_kill_then_hang(Logs(tmp_path))
    run = only_run(tmp_path)
    assert (run.world_size, run.exit_code, run.restarts, run.hosts) == (2, 0, 2, ("node-a",))
    killed, hung, last = run.cycles

    assert (killed.outcome, killed.restarts, killed.iteration) == ("failed", True, 25)
    assert killed.cause is not None
    assert (killed.cause.kind, killed.cause.rank) == (CauseKind.SIGNAL, 1)
    assert killed.noticed_after_s == pytest.approx(0.02)
    assert killed.training_again_after_s == pytest.approx(3.48)  # what the launcher's line said
    assert killed.phases == AGAIN
    assert killed.iterations_redone == 5
    assert killed.fault is not None
    assert (killed.fault.record.type, killed.fault.record.rank, killed.fault.record.iteration) == ("rank_killed", 1, 25)

    assert hung.cause is not None
    assert (hung.outcome, hung.cause.kind, hung.cause.rank, hung.iteration) == ("failed", CauseKind.HANG, 0, 37)
    assert hung.noticed_after_s == pytest.approx(3.01)
    assert hung.training_again_after_s is None  # no launcher said so
    assert (hung.first_iteration, hung.last_iteration, hung.iterations_redone) == (20, 37, 7)

    assert (last.outcome, last.cause, last.noticed_after_s, last.iterations_redone) == ("succeeded", None, None, None)


def test_damaged_logs_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    write_kill_then_hang(logs)
    launcher = next(tmp_path.glob("launcher-*"))
    text = launcher.read_text()
    launcher.write_text(text + '{"t": 31000000000, "ev": "run_en')  # cut off by a crash
    torn = next(tmp_path.glob("monitor-*"))
    with torn.open("ab") as file:  # torn by a full disk, and not ours
        file.write(b'{"t": 12\n[1, 2]\n"text"\n{"t": "now", "ev": "x"}\n\xff\xfe\n\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no-header.jsonl").write_text('{"t": 1, "ev": "attached"}\n')
    (tmp_path / "notes.txt").write_text("not a log\n")
    (tmp_path / "ranks").mkdir()
    run = only_run(tmp_path)
    assert len(run.cycles) == 3
    assert run.passed_over == 6


@pytest.mark.parametrize("broken", [{"wall_ns": None}, {"t": "0"}, {"pid": True}, {"ev": "opened"}])
def test_log_with_a_foreign_header_is_not_read(broken: dict[str, Any]) -> None:
    header = {"t": 0, "ev": "log_opened", "wall_ns": DAWN, "pid": 1}
    assert parse_log([line(header)]) is not None
    assert parse_log([line({**header, **broken})]) is None


def test_table_of_a_run_shows_cause_and_restart_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_kill_then_hang(Logs(tmp_path))
    report_tables.print_report(analyze(only_run(tmp_path)))
    text = capsys.readouterr().out
    killed, hung, finished, first = (line for line in text.splitlines() if "│" in line)
    assert "job run: 2 ranks on 1 node (node-a), " in text
    assert "2 restarts, exit code 0\n2023-11-14 22:13:20 to 22:13:50 (30.01 s), goodput" in text
    assert [cell.strip() for cell in killed.strip("│").split("│")] == [
        "0",
        "rank 1 killed by SIGKILL (not sent by ft_launcher) after iteration 25",
        "1",
        "20 ms",
        "3.48 s",
        "5",
    ]
    assert "rank 0 hung in 'step' for 3.0 s (timeout 3.0 s) after iteration 37" in hung
    assert [cell.strip() for cell in hung.strip("│").split("│")][3:] == ["3.01 s", "-", "7"]
    assert [cell.strip() for cell in finished.strip("│").split("│")] == ["2", "finished", "-", "-", "-", "-"]
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        *("0 to 1", "20 ms", "60 ms", "900 ms", "2.00 s", "500 ms")
    ]


def test_report_command_exits_by_what_the_directory_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(tmp_path)]) == 1
    assert "no event logs in" in capsys.readouterr().err
    assert main.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "can't be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "megatron_ft").mkdir()
    write_kill_then_hang(Logs(tmp_path / "megatron_ft"))
    for directory in (tmp_path / "megatron_ft", tmp_path):  # the second is what --log-dir named
        assert main.main(["report", str(directory)]) == 0
        assert "finished" in capsys.readouterr().out
    assert main.main(["reprot"]) == 2


def of_four(*ranks: int) -> tuple[float, str, dict[str, Any]]:
    of = [{"rank": rank, "local_rank": at, "pid": 7} for at, rank in enumerate(ranks)]
    return (1.0, "cycle_started", {"cycle": 0, "ranks": of, "world_size": 4})


def test_directories_of_several_nodes_are_one_report_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, ranks in (("node-10", (0, 1)), ("node-9", (2, 3))):
        (tmp_path / name).mkdir()
        Logs(tmp_path / name, host=name).write("launcher", of_four(*ranks))
    one, both = str(tmp_path / "node-10"), [str(tmp_path / name) for name in ("node-10", "node-9")]
    assert main.main(["report", "--json", *both]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["hosts"], run["missing_ranks"]) == (["node-9", "node-10"], [])
    assert main.main(["report", "--json", one, one]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["hosts"], run["missing_ranks"]) == (["node-10"], [2, 3])
