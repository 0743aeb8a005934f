"""YAML files: where the section may stand, what is refused and in which words, and that writing is exact."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import ConfigError
from megatron_ft.link.files.atomic_write import write_whole
from tests import ROOT

CONFIGS = ROOT / "megatron_ft" / "configs"


def write(tmp_path: Path, text: str | bytes, name: str = "ft.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def complaint(path: Path | str) -> str:
    """The one line with which reading this file fails."""
    with pytest.raises(ConfigError) as caught:
        FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


class TestFindingTheSection:
    @pytest.mark.parametrize(
        "text",
        [
            "fault_tolerance: {safety_factor: 2}",
            "other: 1\ntrainer:\n  callbacks:\n    fault_tolerance:\n      safety_factor: 2\n",
            "base: &b {safety_factor: 3}\nfault_tolerance: {<<: *b, safety_factor: 2}\n",
            "lr: !unknown {x: 1}\nobj: !!python/object:os.system {}\nfault_tolerance: {safety_factor: 2}\n",
            "twice: 1\ntwice: 2\nloop: &l [*l]\nfault_tolerance: {safety_factor: 2}\n",
            "flags: {fault_tolerance: true}\nfault_tolerance: {safety_factor: 2}\n",
            "\ufefffault_tolerance: {safety_factor: 2}",
        ],
    )
    def test_section_is_found_wherever_it_stands(self, tmp_path: Path, text: str) -> None:
        cfg = FaultToleranceConfig.from_yaml_file(write(tmp_path, text))
        assert cfg.safety_factor == 2
        assert set(cfg.to_dict()) == {"safety_factor"}

    def test_two_different_sections_in_a_file_are_refused(self, tmp_path: Path) -> None:
        text = "a:\n  fault_tolerance: {safety_factor: 2}\nb:\n  fault_tolerance: {safety_factor: 3}\n"
        assert "lines 2 and 4 have different" in complaint(write(tmp_path, text))


class TestComplaints:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("fault_tolerance:\n  rank_hearbeat_timeout: 3", ":2: unknown key 'rank_hearbeat_timeout' (did you"),
            ("fault_tolerance:\n  rank_heartbeat_timeout: -1", ":2: rank_heartbeat_timeout = -1: must be"),
            ("fault_tolerance:\n  rank_heartbeat_timeout: 1e3", "write the number as 1000.0"),
            ("fault_tolerance:\n  rank_section_timeouts: [a]", ":2: rank_section_timeouts = ['a']: must be a map"),
            ("fault_tolerance:\n  log_level: INFO\n  log_level: INFO", ":3: 'log_level' is there twice, first in"),
            ("fault_tolerance: 3", ":1: 'fault_tolerance' must be a mapping"),
            ("fault_tolerance:\n  [1]: 3", ":2: not YAML that can be read here: found unhashable key"),
            ("fault_tolerance: &a\n  rank_section_timeouts: *a", ":1: not YAML that can be read here: found unc"),
            ("fault_tolerance:\n  safety_factor: " + "9" * 5000, ":2: "),
            ("a: 1\nb: [1,2", ":2: not YAML"),
            ("[" * 5000, "nested too deeply"),
            (b"\x7fELF\x02\x01\x01\x00\x00", "not a text file"),
        ],
    )
    def test_mistake_in_the_file_is_one_line_with_place_and_reason(
        self, tmp_path: Path, text: str | bytes, words: str
    ) -> None:
        assert words in complaint(write(tmp_path, text))

    def test_missing_or_unreadable_file_is_one_line(self, tmp_path: Path) -> None:
        assert "No such file" in complaint(tmp_path / "nope.yaml")
        assert "directory" in complaint(tmp_path)
        assert "larger than" in complaint("/dev/zero")
        with pytest.raises(ConfigError, match="null byte"):
            FaultToleranceConfig.from_yaml_file("a\0b")

    def test_lenient_ignores_names_but_not_values(self, tmp_path: Path) -> None:
        path = write(tmp_path, "fault_tolerance: {nonsense: 1, enable_nic_monitor: true, safety_factor: 2}")
        with pytest.warns(UserWarning, match=r"ignored: enable_nic_monitor \(.*:1\) \("):
            cfg: Any = FaultToleranceConfig.from_yaml_file(path)
        assert (set(cfg.to_dict()), cfg.enable_nic_monitor) == ({"safety_factor"}, True)
        with pytest.warns(UserWarning, match="enable_nic_monitor"):
            cfg = FaultToleranceConfig.from_args(
                argparse.Namespace(ft_cfg_path=path, ft_segment="4", ft_rdzv_impl=None)
            )
        assert (cfg.enable_nic_monitor, cfg.segment, hasattr(cfg, "rdzv_impl")) == (True, 4, False)
        with pytest.raises(ConfigError, match="safety_factor"):
            FaultToleranceConfig.from_yaml_file(write(tmp_path, "fault_tolerance: {safety_factor: -2}"))


class TestWriting:
    def test_symlink_is_followed_and_mode_is_plain(self, tmp_path: Path) -> None:
        target = write(tmp_path, "old", "target")
        link = tmp_path / "link"
        link.symlink_to(target.name)
        write_whole(link, b"new", fsync=True, mode=0o600)
        assert link.is_symlink()
        assert target.read_text() == "new"
        assert target.stat().st_mode & 0o777 == 0o600
        write_whole(target, "newer")
        umask = os.umask(0)
        os.umask(umask)
        assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_are_valid(path: Path) -> None:
    assert FaultToleranceConfig.from_yaml_file(path, ignore_not_recognized=False).to_dict()
