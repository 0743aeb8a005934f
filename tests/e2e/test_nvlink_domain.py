"""Which NVLink domain a node is in: as a variable says, else as its driver does."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.launcher.coordination.meeting_place import nvlink_domain

ONE = "        ClusterUUID                       : abc9829a-d4c8-491c-8da5-ad28fb34876b\n"
NONE = "        ClusterUUID                       : 00000000-0000-0000-0000-000000000000\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What nvidia-smi -q writes."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f'#!/bin/sh\ntest "$1" = -q && cat {tmp_path}/told')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "told"


def test_nvlink_domain_is_named_by_the_driver(driver: Path) -> None:
    driver.write_text(f"GPU 0\n    Fabric\n{ONE}GPU 1\n{NONE}GPU 2\n{ONE}")
    assert nvlink_domain({}) == "abc9829a-d4c8-491c-8da5-ad28fb34876b"
    assert nvlink_domain({"FT_NVLINK_DOMAIN": " rack 7 "}) == "rack 7"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (NONE, "no ClusterUUID"),
        ("ClusterUUID : N/A", "no ClusterUUID"),
        (None, "no ClusterUUID"),  # there is no driver
        (ONE + ONE.replace("abc", "abd"), "several ClusterUUIDs"),
    ],
)
def test_node_without_an_nvlink_domain_is_told_what_to_do(driver: Path, told: str | None, why: str) -> None:
    if told is None:
        driver.with_name("nvidia-smi").unlink()
    else:
        driver.write_text(told)
    with pytest.raises(ConfigError, match=f"--ft-segment: nvidia-smi names {why} on this node; .*FT_NVLINK_DOMAIN"):
        nvlink_domain({})
