"""`megatron-ft slurm`: what follows from how a life ended, and the commands that are run for it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.slurm import commands
from megatron_ft.cli.slurm.batch import Batch
from megatron_ft.cli.slurm.job_plan import plan
from megatron_ft.cli.slurm.policy import BatchAction, Next, Plan, decide
from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.faults import Fault, FaultKind
from megatron_ft.job.rules.lives import Ending, Life, Lives

ALLOWED: dict[str, Any] = {"max_lives": 5, "max_failures": 2, "needed": 3, "nodes": 4}
PLAN = Plan(job="7", log_dir="", launcher=(), srun_options=(), excludes_bad_nodes=False, **ALLOWED)
SRUN, REQUEUE, END = BatchAction.SRUN, BatchAction.REQUEUE, BatchAction.END


def after(*endings: Ending, code: int = 1, **changes: object) -> Next:
    lives = [Life(job="j", outcome=each, cause="rank 0 exited with code 7") for each in endings]
    known: dict[str, Any] = {"before": max(0, len(lives) - 1), "code": code, "nodes": 4, **changes}
    return decide(PLAN, lives, **known)


@pytest.mark.parametrize(
    ("endings", "code", "changes", "action", "own_code"),
    [
        ([Ending.FINISHED], 0, {}, END, 0),
        ([Ending.NO_PROGRESS], 93, {}, END, 93),
        ([Ending.MISTAKE], 2, {}, END, 2),
        ([Ending.STOPPED], 0, {}, REQUEUE, 0),
        ([Ending.STOPPED], 130, {"asked": "SIGINT"}, END, 130),
        ([Ending.LOST], 94, {}, SRUN, 0),
        ([Ending.LOST], 94, {"nodes": 2}, REQUEUE, 0),
        ([Ending.LOST], 94, {"asked": "SIGTERM"}, REQUEUE, 0),
        ([Ending.LOST], 94, {"steps": 3}, REQUEUE, 0),
        # srun was killed, or all launchers were
        ([Ending.RUNNING], 137, {}, SRUN, 0),
        ([Ending.FAILED], 1, {}, SRUN, 0),
        ([Ending.FAILED, Ending.FAILED], 1, {}, END, 1),
        ([Ending.FAILED, Ending.STOPPED, Ending.FAILED], 1, {}, SRUN, 0),
        ([Ending.STOPPED] * 5, 0, {}, END, 1),
        # no launcher has got so far as to write anything
        ([], 2, {}, END, 2),
        ([], 1, {}, SRUN, 0),
    ],
)
def test_job_ends_is_run_again_or_is_requeued_by_its_last_endings(
    endings: list[Ending], code: int, changes: dict[str, object], action: BatchAction, own_code: int
) -> None:
    follows = after(*endings, code=code, **changes)
    assert (follows.action, follows.code) == (action, own_code)
    assert follows.why


def test_life_is_numbered_as_in_result_json() -> None:
    """Of more than 200 lives the oldest are dropped."""
    lives = [Life(life=number, job="j", outcome=Ending.LOST) for number in (41, 42)]
    for before, number in ((1, 42), (2, 43)):
        why = decide(PLAN, lives, before=before, code=1, nodes=4).why
        assert why.startswith(f"life {number} was lost")


@pytest.mark.parametrize(
    ("more", "export"),
    [
        ([], "ALL"),
        (["--exclude=b"], "ALL"),
        (["--export=NONE"], "NONE"),
        (["--export", "A,B"], "A,B"),
    ],
)
def test_launchers_get_the_environment_of_the_script_unless_srun_is_told_otherwise(
    more: list[str], export: str
) -> None:
    words = commands.srun(nodes=1, exclude=[], more=more, launcher=["ft_launcher", "--export=x"])
    assert commands.export_of(words[:-2]) == export
    assert ("--export=ALL" in words) is (export == "ALL")


def test_variables_that_srun_does_not_export_are_found() -> None:
    names = ["FT_SECRET", "FT_X"]
    for export, missing in (("", []), ("ALL", []), ("ALL,A=b", []), ("NONE", names), ("A,FT_SECRET=1", ["FT_X"])):
        assert commands.not_exported(export, names) == missing


def test_srun_is_told_that_nobody_ends_with_another() -> None:
    words = commands.srun(nodes=3, exclude=["b"], more=["--container-image=x"], launcher=["ft_launcher", "t.py"])
    assert words[:4] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"]
    assert {"--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--exclude=b", "--container-image=x"} <= set(words)
    assert words[-2:] == ["ft_launcher", "t.py"]
    outer = {"SLURM_WAIT": "60", "SLURM_KILL_BAD_EXIT": "1", "A": "b", "FT_SLURM_REQUEUES": "6"}
    environ = {"A": "b", "FT_BAD_NODES_TOLD_BY": "megatron-ft slurm", "FT_SLURM_REQUEUES": "7"}
    assert commands.srun_environment(outer, requeues="7") == environ


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "17", "SLURM_SUBMIT_DIR": "/home/u"}


def arguments(*words: str, **changes: object) -> argparse.Namespace:
    known = {"spares": 0, "max_lives": 20, "max_failures": 3, "exclude_bad_nodes": False}
    known |= {"dry_run": False, "nodes": None}
    return argparse.Namespace(
        **{**known, "srun": [], "launcher": "ft_launcher", "arguments": list(words or ["t.py"]), **changes}
    )


def test_spares_are_left_out_of_the_nodes_that_train() -> None:
    made = plan(arguments(spares=1), JOB)
    assert made.launcher == ("ft_launcher", "--ft-log-dir=/home/u/ft-7", "--nnodes=16", "t.py")
    assert (made.nodes, made.needed) == (17, 16)


def test_launcher_options_of_the_user_win_over_ours() -> None:
    made = plan(arguments("--nnodes", "12:16", "--ft_log_dir=/logs", "t.py", "--nnodes=1"), JOB)
    assert made.launcher == ("ft_launcher", "--nnodes", "12:16", "--ft_log_dir=/logs", "t.py", "--nnodes=1")
    assert (made.log_dir, made.needed) == ("/logs", 12)


@pytest.mark.parametrize(
    ("changes", "environ", "match"),
    [
        ({}, {}, "SLURM_JOB_ID isn't set"),
        ({"nodes": 3}, JOB, "--nodes 3: only with --dry-run and outside a job"),
        ({"spares": 17}, JOB, "--spares 17: the job has 17 nodes"),
        ({"arguments": ["t.py"]}, {**JOB, "SLURM_STEP_NUM_TASKS": "2"}, "srun has started .* 2 times"),
        ({"arguments": ["--nnodes=x", "t.py"]}, JOB, "--nnodes: 'x'"),
    ],
)
def test_mistaken_slurm_options_are_refused_with_a_message(
    changes: dict[str, object], environ: dict[str, str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(arguments(**changes), environ)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--spares 1 --nproc-per-node 8 t.py", "-- or what follows it is missing: what is to be run comes after --"),
        ("--dry-run --", "missing"),
        ("--nnodes 2 -- t.py", "unrecognized arguments: --nnodes"),
        ("--chain -- t.py", r"no option chain any more: .* sbatch --dependency=afternotok:JOBID"),
        ("--sparse 1 -- t.py", "did you mean '--spares'"),
    ],
)
def test_forgotten_separator_is_named(
    words: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert main(["slurm", *words.split()]) == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_a_dry_run_prints_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    options = ["--spares", "1", "--exclude-bad-nodes", "--launcher", "ft_launcher", "--dry-run"]
    assert main(["slurm", *options, "--", "--nproc-per-node", "8", "t.py", "--save", "x"]) == 0
    out = capsys.readouterr().out
    launched = "ft_launcher --ft-log-dir=/home/u/ft-7 --nnodes=16 --nproc-per-node 8 t.py --save x"
    assert out.splitlines()[0].endswith(launched)
    for command in ("scancel --signal=TERM 7", "scontrol requeue 7", "scontrol --oneliner show job 7", "ExcNodeList"):
        assert command in out


def test_bad_nodes_that_are_not_needed_are_left_out_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Fault(node="b", cycle=0, kind=FaultKind.LOST, text="gone")
    (tmp_path / "result.json").write_text(Lives(lives=(Life(job="j", outcome=Ending.LOST, faults=(bad,)),)).to_text())
    monkeypatch.setattr(Batch, "_allocation", lambda _: commands.Job(state="RUNNING", nodes=3, hosts="a,b,c"))
    for options, begin in (({"exclude_bad_nodes": True}, "srun --nodes=2 "), ({}, "srun --nodes=3 ")):
        made = plan(
            arguments(f"--ft-log-dir={tmp_path}", "t.py", spares=1, **options), {**JOB, "SLURM_JOB_NUM_NODES": "3"}
        )
        Batch(made, {}).print_commands()
        out = capsys.readouterr().out
        assert out.startswith(begin)
        assert ("--exclude=b " in out) is bool(options)


def test_dry_run_on_a_login_node_needs_no_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_SUBMIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert (
        main(["slurm", "--dry-run", "--nodes", "17", "--spares", "1", "--launcher", "ft_launcher", "--", "t.py"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("srun --nodes=17 --ntasks=17 ")
    assert "--nnodes=16 t.py" in out
    assert "scontrol requeue JOBID, for up to 20 lives" in out
    assert main(["slurm", "--dry-run", "--max-lives", "1", "--", "t.py"]) == 0
    assert "requeue" not in capsys.readouterr().out
