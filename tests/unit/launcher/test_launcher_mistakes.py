"""Mistakes of the user: one line on standard error, exit code 2, and no rank was started."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules.messages import Identity
from megatron_ft.launcher import job
from megatron_ft.launcher import main as launcher_main
from megatron_ft.launcher.coordination import joining
from megatron_ft.launcher.main import run_command
from megatron_ft.launcher.schedulers import kubernetes


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that leaves a trace if it is ever run; state and temporary files go to the test's directory."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in [name for name in os.environ if name.startswith(("PET_", "FT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "script.py"
    path.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    return path


@pytest.fixture(autouse=True)
def of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that they have left don't end this process with ``main``."""
    monkeypatch.setattr(launcher_main, "THREAD_PREFIX", "no thread of ours")


def mistake(capfd: pytest.CaptureFixture[str], script: Path, argv: Sequence[str]) -> str:
    """The one line that these arguments give."""
    assert run_command(list(argv)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("ft_launcher: error: ")
    assert not (script.parent / "was_run").exists()
    return err.removeprefix("ft_launcher: error: ").strip()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes=abc"], ["--nnodes", "abc"]),
        (["--nnodes=2:1"], ["--nnodes", "2:1", "MIN <= MAX"]),
        (["--max-restarts=-1"], ["--max-restarts", "-1"]),
        (["--nproc-per-node=lots"], ["nproc_per_node", "lots"]),
        (["--tee=7"], ["--tee: '7' must be 0 (nothing)"]),
        (["--log-dir", os.path.abspath(__file__)], ["--log-dir", os.path.basename(__file__)]),
        (["--ft-log-dir", os.path.abspath(__file__)], ["--ft-log-dir", "no directory"]),
        (["--numa-binding=node"], ["--numa-binding", "no CUDA GPU"]),
        (["--event-log-handler=nothing"], ["--event-log-handler", "'nothing'"]),
        (["--rdzv-backend=etcd", "--nnodes=2"], ["--rdzv-backend etcd", "--rdzv-endpoint HOST:2379"]),
        (["--rdzv-backend=zeus", "--nnodes=1"], ["--rdzv-backend", "'zeus'", "coordinator", "--rdzv-backend c10d"]),
        (
            ["--rdzv-backend=c10d", "--rdzv-conf=timeout=9, store_type = file"],
            ["--rdzv-conf", "store_type=file", "c10d"],
        ),
        (["--signals-to-handle=SIGTERM,SIGFOO"], ["--signals-to-handle", "SIGFOO"]),
        (
            ["--ft-forward-signals=SIGUSR2", "--signals-to-handle=SIGTERM,SIGUSR2"],
            ["--ft-forward-signals: SIGUSR2 ends the job (it is one of --signals-to-handle)"],
        ),
        (["--no-python", "-m"], ["--no-python", "--module"]),
        (["--ft-param-rank_hartbeat_timeout=5"], ["'--ft-rank-heartbeat-timeout'"]),
        (["--max-restart-count=3"], ["unrecognized", "--max-restart"]),
    ],
)
def test_mistake_in_an_option_is_one_line_and_code_2(
    options: list[str], words: list[str], script: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = mistake(capfd, script, [*options, str(script)])
    for word in words:
        assert word in line
    assert not list((tmp_path / "state").glob("megatron_ft/*"))


def test_mistake_in_the_configuration_file_is_one_line_and_code_2(
    script: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance:\n  rank_hartbeat_timeout: 5\n")
    line = mistake(capfd, script, ["--fault-tol-cfg-path", str(path), str(script)])
    assert "rank_hartbeat_timeout" in line
    assert "rank_heartbeat_timeout" in line


def test_script_that_does_not_exist_is_one_line_and_code_2(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "there is no script nowhere.py" in mistake(capfd, script, ["--max-restarts=3", "nowhere.py"])
    folder = str(script.parent)
    assert f"{folder} is a directory without a __main__.py" in mistake(capfd, script, ["--max-restarts=3", folder])
    assert "no such command" in mistake(capfd, script, ["--no-python", "no-such-command"])


def test_modules_that_python_does_not_find_are_one_line_and_code_2(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    (script.parent / "here.py").touch()
    assert "-m no.such: Python finds no module 'no' here" in mistake(capfd, script, ["-m", "no.such"])
    (script.parent / "package").mkdir()
    (script.parent / "package" / "__init__.py").touch()
    assert "-m package: the package has no __main__.py" in mistake(capfd, script, ["-m", "package"])
    named = ["--ft-preload", "here,torch.nn,nun", str(script)]
    assert "--ft-preload nun: Python finds no module 'nun' here" in mistake(capfd, script, named)


def test_binding_by_a_variable_of_the_reference_is_refused_with_the_option_to_use(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRX_GPUS_PER_NUMA", "4")
    assert "--numa-binding node" in mistake(capfd, script, [str(script)])


def _no_file(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_launcher_is_as_old_as_its_call_not_as_its_process(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = []

    def stopped_here(identity: Identity, **_: object) -> NoReturn:
        identities.append(identity)
        raise ConfigError("enough")

    monkeypatch.setattr(joining, "Member", stopped_here)
    before_s = time.monotonic()
    assert run_command([str(script)]) == 2
    (identity,) = identities
    assert before_s <= identity.started_s <= time.monotonic()


class _Gone(io.StringIO):
    """Standard error of a terminal that is closed."""

    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_error_before_the_job_begins_is_said_in_the_launchers_form(
    script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(job, "run", _no_file)
    monkeypatch.setattr(kubernetes, "write_reason", reasons.append)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    said = "the launcher can't start: OSError: [Errno 24] Too many open files"
    assert run_command([str(script)]) == 1
    assert capfd.readouterr().err == f"[ft_launcher] {said}\n"
    monkeypatch.setattr(sys, "stderr", _Gone())
    assert run_command([str(script)]) == 1
    assert run_command(["--no-such-option", str(script)]) == 2
    assert reasons[:-1] == [f"failed: {said}"] * 2
    assert reasons[-1].startswith("mistake: unrecognized arguments: --no-such-option")
