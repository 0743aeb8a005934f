"""`megatron-ft` itself: help, version, a hint for a misspelt command; the templates, and completion."""

from __future__ import annotations

import pytest
import yaml

import megatron_ft
from megatron_ft.cli import config_template, main


def test_bare_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: megatron-ft")
    assert "config-template" in out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"megatron-ft {megatron_ft.__version__}\n"


def test_misspelt_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["reprot"]) == 2
    assert capsys.readouterr().err == "megatron-ft: error: there is no command reprot (did you mean 'report'?)\n"


@pytest.mark.parametrize("name", config_template.names())
def test_template_is_printed_whole_and_is_yaml(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config-template", name]) == 0
    out = capsys.readouterr().out
    assert out == (config_template.TEMPLATES / f"{name}.yaml").read_text()
    assert ("faults" if name.startswith("faults/") else "fault_tolerance") in yaml.safe_load(out)


def test_completion_knows_both_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main.main(["completion", "bash"]) == 0
    out = capsys.readouterr().out
    for word in (
        "config-template",
        "--nproc-per-node",
        "--ft-observe-only",
        "_shtab_megatron_ft megatron-ft",
        "_shtab_ft_launcher ft_launcher",
    ):
        assert word in out


def test_completion_without_shtab_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main.main(["completion", "bash"]) == 2
    assert "pip install 'megatron-ft[completion]'" in capsys.readouterr().err
