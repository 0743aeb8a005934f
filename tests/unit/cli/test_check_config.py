"""`megatron-ft check-config`, and the one line that every mistake on the command line of `megatron-ft` gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.cli import main
from megatron_ft.config.config import FIELDS

TEXT = "model: {layers: 2}\ntrain:\n  fault_tolerance:\n    rank_section_timeouts: {setup: 600, step: null}\n"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_FT_CFG_PATH", "PET_TERM_TIMEOUT", "PET_WORKERS_STOP_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def write(tmp_path: Path, text: str = TEXT) -> str:
    path = tmp_path / "ft.yaml"
    path.write_text(text)
    return str(path)


def table(text: str) -> dict[str, list[str]]:
    """Cells by the first one, whatever is drawn between them."""
    found = {}
    for line in text.splitlines():
        cells = line.replace("│", "  ").replace("┃", "  ").split("  ")
        cells = [cell.strip() for cell in cells if cell.strip()]
        if cells:
            found[cells[0]] = cells[1:]
    return found


def test_check_config_prints_values_and_their_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    options = ["--ft-safety-factor=0.5", "--ft-exit-timeout=7", "--ft-enable-nic-monitor=true"]
    assert main.main(["check-config", path, *options]) == 0
    out = capsys.readouterr().out
    told = table(out)
    assert told["name"] == ["value", "from"]
    assert told["rank_section_timeouts[setup]"] == ["600", f"{path}:4"]
    assert told["rank_section_timeouts[step]"] == ["null", f"{path}:4"]
    assert told["safety_factor"] == ["0.5", "command line"]
    assert told["rank_heartbeat_timeout"] == ["2700", "default"]
    assert told["exit_timeout"] == ["7", "command line"]
    assert told["startup_timeout"] == ["null", "default"]
    for name in FIELDS.keys() - {"rank_section_timeouts"}:
        assert name in told
    assert "warning: ignored: --ft-enable-nic-monitor (" in out


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "fault_tolerance:\n  rank_heartbeat_timout: 3\n",
            [],
            "ft.yaml:2: unknown key 'rank_heartbeat_timout' (did you",
        ),
        ("fault_tolerance:\n  safety_factor: -1\n", [], "ft.yaml:2: safety_factor = -1"),
        ("a: 1\n", [], "there is no 'fault_tolerance' section"),
        ("fault_tolerance: [\n", [], "not YAML"),
        (TEXT, ["--ft-observe-onyl"], "unrecognized arguments: --ft-observe-onyl (did you mean '--ft-observe-only'"),
        (TEXT, ["--ft-forward-signals=SIGSTOP"], "SIGSTOP can't be forwarded"),
        (TEXT, ["--ft-cfg-path=other.yaml"], "two files: "),
    ],
)
def test_mistake_in_the_file_or_options_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], words: str
) -> None:
    assert main.main(["check-config", write(tmp_path, text), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron-ft: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_missing_file_is_an_error_unless_it_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check-config", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main.main(["check-config", str(tmp_path / "none.yaml"), "--ignore-missing-fault-tol-cfg"]) == 0
    assert "continuing without it" in capsys.readouterr().out


def test_mistakes_of_other_commands_are_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["reprot"], ["report"], ["pause", "--pid", "x"], ["pause", "--pid=1", "--job=x"]):
        assert main.main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("megatron-ft: error: ")
        assert err.count("\n") == 1


def test_torchrun_options_are_accepted_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--nproc_per_node=8", "--standalone", "-r", "3", "--te", "1", "--signals-to-handle", "SIGTERM"]
    assert main.main(["check-config", write(tmp_path), *line, "--shutdown-timeout=7", "--ft-forward-signals=HUP"]) == 0
    told = table(capsys.readouterr().out)
    assert told["term_timeout"] == ["7", "--shutdown-timeout"]
    assert told["forward_signals"] == ["SIGHUP", "command line"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ft-forward-signals=HUP"], "--ft-forward-signals: SIGHUP ends the job"),
        (["--signals-to-handle=SIGFOO"], "--signals-to-handle: 'SIGFOO' is no signal"),
        (["--shutdown-timeout=soon"], "--shutdown-timeout 'soon': must be a number of seconds from 0"),
        (["--shutdown-timeout=inf"], "--shutdown-timeout inf: must be a number of seconds from 0"),
        (["--ft-segment=null"], "--ft-segment null: must be a whole number"),
        (["--ter=7"], "unrecognized arguments: --ter=7"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["check-config", *options]) == 2
    assert words in capsys.readouterr().err
