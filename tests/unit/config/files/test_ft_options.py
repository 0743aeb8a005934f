"""ft_launcher's options beyond torchrun's: spellings, precedence, sources, and one line for each mistake."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
from pathlib import Path

import pytest

from megatron_ft.config.config import FIELDS, OPTIONS
from megatron_ft.config.files.options import add_ft_options, as_record, read_ft_options, summary, with_hint
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.config.launcher_options import END, OFF
from megatron_ft.errors import ConfigError
from megatron_ft.link.base.codec import encode

TEXTS = {
    "rank_section_timeouts": "setup:600,step:null",
    "rank_termination_signal": "SIGTERM",
    "log_level": "DEBUG",
    "learn": "reference",
}


def parser() -> argparse.ArgumentParser:
    """Stands in for torchrun's parser: importing torch would take longer than all these tests."""
    result = argparse.ArgumentParser()
    result.add_argument("--log-dir", "--log_dir")
    result.add_argument("--max-restarts", "--max_restarts")
    result.add_argument("training_script")
    result.add_argument("training_script_args", nargs=argparse.REMAINDER)
    add_ft_options(result)
    return result


def read(*options: str) -> FaultToleranceConfig:
    return read_ft_options(parser().parse_args([*options, "train.py", "--ft-log-level", "of the script"]))


def complaint(*options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ft.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_FT_CFG_PATH", "PET_TERM_TIMEOUT", "PET_WORKERS_STOP_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def test_options_without_arguments_are_all_defaults() -> None:
    options = read()
    assert options == FaultToleranceConfig()
    assert options.to_dict() == {}
    assert options.warnings == []
    assert options.restart_policy == "any-failed"
    assert (options.term_timeout, options.workers_stop_timeout) == (1800.0, 5.0)
    assert not options.is_set("workers_stop_timeout")
    assert options.log_dir is None
    assert summary(options) == "configuration: all defaults"
    assert options.sources == {}


@pytest.mark.parametrize("field", FIELDS)
def test_field_can_be_set_in_every_spelling(field: str) -> None:
    text = TEXTS.get(field, "7")
    expected = FaultToleranceConfig.from_args(argparse.Namespace(**{f"ft_{field}": text}))
    prefixes = ("--ft-param-", "--ft-", "--ft_param_", "--ft_")
    for prefix, name in itertools.product(prefixes, (field, field.replace("_", "-"))):
        for given in ([f"{prefix}{name}={text}"], [f"{prefix}{name}", text]):
            options = read(*given)
            assert options == expected, given
            assert set(options.to_dict()) == {field}
            assert options.sources[field] == "command line"


@pytest.mark.parametrize("word", ["--ft-learn-timeouts=off", "--ft-param-timeout_rule=reference"])
def test_removed_option_on_the_command_line_is_one_line_with_what_to_use(word: str) -> None:
    name = "learn_timeouts" if "learn" in word else "timeout_rule"
    text = with_hint(f"unrecognized arguments: {word}", parser())
    assert text.startswith(f"there is no option {name} any more: use learn")


@pytest.mark.parametrize(("word", "stored"), [("on", "on"), ("off", "off"), ("report", "report")])
def test_learn_in_a_file_may_be_a_word_that_yaml_reads_as_a_boolean(word: str, stored: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"fault_tolerance:\n  learn: {word}\n")
    assert read(f"--fault-tol-cfg-path={path}").learn == stored


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  fault_tolerance:\n    safety_factor: 2\n    log_level: DEBUG\n")
    options = read(f"--fault-tol-cfg-path={path}", "--ft-param-safety_factor=3")
    assert options.to_dict() == {"safety_factor": 3.0, "log_level": "DEBUG"}
    assert options.sources == dict.fromkeys(("cfg_path", "safety_factor"), "command line") | {"log_level": f"{path}:4"}
    assert summary(options) == (
        f"configuration: safety_factor=3 (command line), log_level=DEBUG ({path}:4); else defaults"
    )
    logged = json.loads(encode(as_record(options, ["train.py"])))
    values, sources = logged["values"], logged["sources"]
    assert (values["log_level"], sources["log_level"]) == ("DEBUG", f"{path}:4")
    assert (values["rank_heartbeat_timeout"], sources["rank_heartbeat_timeout"]) == (2700.0, "default")
    assert set(OPTIONS) - set(values) == set(OPTIONS) - set(sources) == {"cfg_path", "ignore_missing_cfg", "dry_run"}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--ft-param-rank_section_timeouts=setup", "NAME:SECONDS"),
        ("--ft-param-rank_heartbeat_timeout=-5", "--ft-rank-heartbeat-timeout -5: must be a positive number"),
        ("--term-timeout=soon", "--term-timeout 'soon': must be"),
        ("--ft-node-health-command= ", "--ft-node-health-command ' ': must be a shell command"),
        ("--ft-watch-collectives=end:0", "--ft-watch-collectives 'end:0': must be report, end, report:SECONDS"),
        (
            "--ft-forward-signals=SIGUSR9",
            "'SIGUSR9': must be names of signals, for example SIGUSR1,SIGUSR2 (did you mean 'SIGUSR",
        ),
        (
            "--ft-forward-signals=SIGKILL",
            "; SIGKILL can't be forwarded",
        ),
        ("--fault-tol-cfg-path=/nowhere/ft.yaml", "can't read /nowhere/ft.yaml: No such file"),
    ],
)
def test_mistake_in_an_option_is_one_line(option: str, words: str) -> None:
    assert words in complaint(option)


def test_file_without_the_section_needs_options_or_permission(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1")
    assert "there is no 'fault_tolerance' section" in complaint("--ft-cfg-path", path)
    assert "there is no 'fault_tolerance' section" in complaint("--ft-cfg-path", path, "--ft-log-dir=/tmp")
    options = read("--ft-cfg-path", path, "--ft-safety-factor=2")
    assert options.safety_factor == 2
    assert options.warnings == []
    (warning,) = read("--ft-cfg-path", path, "--ignore-missing-fault-tol-cfg").warnings
    assert "continuing with the defaults" in warning


def test_ignoring_a_missing_file_ignores_nothing_else(tmp_path: Path) -> None:
    (warning,) = read(f"--ft-cfg-path={tmp_path}/nope.yaml", "--ignore-missing-fault-tol-cfg").warnings
    assert "nope.yaml" in warning
    broken = write(tmp_path, "fault_tolerance: [")
    assert "not YAML" in complaint("--ft-cfg-path", broken, "--ft-ignore-missing-cfg")


def test_null_for_an_option_of_the_reference_is_not_given(tmp_path: Path) -> None:
    nulls = (
        "segment: null, checkpoint_iteration_file: null, attribution_endpoint: null, rank_out_of_section_timeout: null"
    )
    options = read("--ft-cfg-path", write(tmp_path, f"fault_tolerance: {{{nulls}}}"))
    assert (options.warnings, options.segment) == ([], read().segment)
    assert options.is_set("rank_out_of_section_timeout")
    assert not options.is_set("segment")


def test_values_of_the_launchers_own_kinds_are_read_and_shown() -> None:
    assert read("--ft-watch-collectives=end:1.5").watch_collectives == (END, 1.5)
    assert read("--ft-watch-collectives=off").watch_collectives == (OFF, None)
    assert read("--ft-node-health-timeout=null").node_health_timeout is None
    options = read("--ft-exit-timeout", "1.5", "--ft-observe-only", "--ft-forward-signals=usr1, SIGUSR2")
    assert (options.exit_timeout, options.observe_only) == (1.5, True)
    assert options.forward_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert summary(options) == (
        "configuration: exit_timeout=1.5 (command line), observe_only=yes (command line), "
        "forward_signals=SIGUSR1,SIGUSR2 (command line); else defaults"
    )


def test_options_are_read_from_pet_variables_as_torchrun_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_FT_CFG_PATH", write(tmp_path, "fault_tolerance: {safety_factor: 2}"))
    monkeypatch.setenv("PET_TERM_TIMEOUT", "12")
    monkeypatch.setenv("PET_WORKERS_STOP_TIMEOUT", "3")
    options = read()
    assert options.safety_factor == 2
    assert (options.term_timeout, options.workers_stop_timeout) == (12.0, 3.0)
    assert options.is_set("workers_stop_timeout")
    assert options.sources["term_timeout"] == "PET_TERM_TIMEOUT"
    assert read("--term-timeout=1").sources["term_timeout"] == "command line"
