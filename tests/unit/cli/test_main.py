"""`megatron-ft` itself: help, version, a hint for a misspelt command; the templates, and what is gone."""

from __future__ import annotations

import pytest
import yaml

from megatron_ft.cli import config_template, main


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["reprot"], "there is no command reprot (did you mean 'report'?)"),
        (["report"], "the following arguments are required: LOG_DIR"),
        (["report", "logs", "--png", "x"], "there is no report --png any more: megatron-ft report --html FILE"),
        (["report", "logs", "--jsno", "=x"], "unrecognized arguments: --jsno =x"),
        (["pause", "--pid=1", "--job=x"], "argument --job: not allowed with argument --pid"),
        (["exporter", "logs", "--port", "9466"], "there is no command exporter any more: ft_launcher serves metrics"),
    ],
)
def test_mistake_or_command_that_is_gone_is_one_line(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"megatron-ft: error: {answer}")
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", config_template.names())
def test_template_is_printed_whole_and_is_yaml(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config-template", name]) == 0
    out = capsys.readouterr().out
    assert out == (config_template.TEMPLATES / f"{name}.yaml").read_text()
    assert ("faults" if name.startswith("faults/") else "fault_tolerance") in yaml.safe_load(out)
