"""What is taken from the scheduler where it isn't given on the command line."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.lives import Ending
from megatron_ft.launcher import arguments
from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.directories import make_log_directory
from megatron_ft.launcher.coordination import meeting_place as meeting_places
from megatron_ft.launcher.coordination.meeting_place import meeting_place
from megatron_ft.launcher.outcome import LauncherEnd
from megatron_ft.launcher.schedulers.kubernetes import write_reason
from megatron_ft.launcher.schedulers.schedulers import detect

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node09",
}
TWO_EACH = {**STEP, "SLURM_STEP_NUM_TASKS": "6"}
PORT = 20000 + 4711 * 16 % 9000
C10D = "--rdzv-backend=c10d"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM_", "KUBERNETES_", "JOB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(meeting_places, "routes", lambda _host: {})


def line_in(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *options: str) -> CommandLine:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return parse([*options, __file__])


def test_nodes_endpoint_and_id_are_taken_from_slurm_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_in(monkeypatch, STEP)
    assert (line.min_nodes, line.max_nodes, line.run_id) == (3, 3, "4711.0.0")
    assert line.where.log_name == "slurm-4711.0"
    place = meeting_place(line, os.environ)
    assert not place.is_alone
    assert place.me.endpoint == f"node08:{PORT}"
    assert (place.me.rank, place.me.is_here) == (1, False)
    assert line.taken == (
        f"Slurm job 4711 step 0: --nnodes 3, --rdzv-endpoint node08:{PORT}, --rdzv-id 4711.0.0 "
        "(--scheduler none disables this)"
    )


@pytest.mark.parametrize(
    ("options", "endpoint", "nodes", "run_id"),
    [
        (["--nnodes=2"], f"node08:{PORT}", 2, "4711.0.0"),
        (["--nnodes=2:3"], f"node08:{PORT}", 3, "4711.0.0"),
        ([C10D], f"node08:{PORT}", 3, "4711.0.0"),
        (["--rdzv-backend=static"], f"node08:{PORT}", 3, "4711.0.0"),
        (["--rdzv-endpoint=a:7"], "a:7", 3, "4711.0.0"),
        (["--master-addr=a"], "a:29500", 3, "4711.0.0"),
        (["--rdzv-id=mine"], f"node08:{PORT}", 3, "mine"),
    ],
)
def test_given_options_win_over_the_scheduler(
    options: list[str], endpoint: str, nodes: int, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_in(monkeypatch, STEP, *options)
    place = meeting_place(line, os.environ)
    assert (place.me.endpoint, line.max_nodes, line.run_id) == (endpoint, nodes, run_id)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"}])
@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ([], "the job has 3 nodes, but srun didn't start this launcher: ranks start on this node alone.*srun --ntasks"),
        (["--nnodes=3", C10D, "--rdzv-endpoint=a:7"], "it waits for the other nodes' launchers .--nnodes 3.*srun "),
        (["--nnodes=1:3", C10D, "--rdzv-endpoint=a:7"], "it waits for the other nodes' launchers"),
        (["--nnodes=1"], None),
        (["--standalone"], None),
        (["--scheduler=none"], None),
    ],
)
def test_forgotten_srun_is_named(
    step: dict[str, str], options: list[str], warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[1-3]", **step}
    warnings = line_in(monkeypatch, script, *options).options.warnings
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert re.search(warning, warnings[0])


def test_job_has_another_identity_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = set()
    for change in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}):
        line = line_in(monkeypatch, {**STEP, **change})
        jobs.add(meeting_place(line, os.environ).me.job)
    assert len(jobs) == 4


@pytest.mark.parametrize("options", [[], ["--nnodes=3"], ["--nnodes=2:3"]])
def test_two_launchers_on_a_node_are_refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"srun has started 6 launchers on 3 nodes.*--ntasks-per-node=1"):
        line_in(monkeypatch, TWO_EACH, *options)


def test_two_launchers_on_a_node_are_accepted_as_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_in(monkeypatch, TWO_EACH, "--nnodes=6").min_nodes == 6


def test_settings_that_defeat_recovery_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_in(monkeypatch, {**STEP, "SLURM_KILL_BAD_EXIT": "1", "SLURM_WAIT": "60"})
    first, second = line.options.warnings
    assert first.startswith("SLURM_KILL_BAD_EXIT is set")
    assert second.startswith("SLURM_WAIT is 60")
    monkeypatch.setenv("SLURM_KILL_BAD_EXIT", "0")
    monkeypatch.setenv("SLURM_WAIT", "0")
    assert parse([__file__]).options.warnings == []


@pytest.mark.parametrize("choice", ["slurm", "pbs"])
def test_scheduler_that_is_not_there_is_refused(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        line_in(monkeypatch, {}, f"--scheduler={choice}")


def test_users_signals_are_for_ranks_that_want_them_and_else_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(line_in(monkeypatch, STEP).save_signals) == {signal.SIGUSR1, signal.SIGUSR2}
    assert line_in(monkeypatch, STEP, "--ft-forward-signals=USR1").save_signals == (signal.SIGUSR2,)
    assert line_in(monkeypatch, STEP, "--scheduler=none").save_signals == ()


def test_nodes_and_lives_of_a_job_share_a_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = {make_log_directory(ft_log_dir=None, torch_log_dir=None, run_id="x", job_name="slurm-7") for _ in range(2)}
    assert made == {str(tmp_path / "megatron_ft" / "slurm-7")}


def test_indexed_job_behind_a_headless_service_meets_at_its_first_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "full_name", lambda: "llama-2.llama-net.default.svc.cluster.local")
    line = line_in(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}, "--nnodes=4")
    assert line.namespace.rdzv_endpoint == "llama-0.llama-net.default.svc.cluster.local:29500"
    assert (line.run_id, line.where.stopped_code) == ("llama", 143)
    assert meeting_place(line, os.environ).me.rank == 2


def test_an_operators_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "full_name", lambda: "job-node-0-1")
    operator = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
    }
    line = line_in(monkeypatch, operator)
    place = meeting_place(line, os.environ)
    assert (place.me.endpoint, place.me.rank) == ("job-node-0-0.job:29400", 1)


def test_other_pods_say_nothing_of_their_job_and_have_a_code_of_their_own_when_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, full_name="bench-7d9f")
    assert (where.scheduler, where.run_id, where.endpoint, where.stopped_code) == ("kubernetes", "", "", 143)
    assert line_in(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "--scheduler=none").where.stopped_code is None


def test_a_pod_has_less_time_than_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for options, is_told in ([], True), (["--term-timeout=30"], True), (["--term-timeout=29"], False):
        warnings = line_in(monkeypatch, pod, *options).options.warnings
        assert any("terminationGracePeriodSeconds" in each for each in warnings) is is_told
    assert line_in(monkeypatch, pod, "--scheduler=none").options.warnings == []


def test_kubernetes_is_told_why(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.write_text("x" * 5000)
    write_reason(LauncherEnd(93, Ending.NO_PROGRESS, "rank 0 exited with code 7").reason, path=str(path))
    assert path.read_text() == "no progress: rank 0 exited with code 7"
    write_reason(LauncherEnd(1, Ending.FAILED, "y" * 9999).reason, path=str(path))
    assert path.stat().st_size == 4000
    write_reason(LauncherEnd(0).reason, path=str(path))
    write_reason(LauncherEnd(0, Ending.FINISHED).reason, path=str(tmp_path / "none"))
    assert os.listdir(tmp_path) == ["termination-log"]


def test_pod_says_all_lines_of_the_job_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not line_in(monkeypatch, {}, "--nnodes=2", C10D).says_all
    assert line_in(monkeypatch, {"MEGATRON_FT_SAYS_ALL": "1"}, "--nnodes=2", C10D).says_all
    assert line_in(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "--nnodes=2", C10D).says_all
