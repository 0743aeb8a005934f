"""What ready checks find wrong with a node."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ft.cli import node_health
from megatron_ft.cli.node_health import (
    LEAST_FREE_BYTES,
    directory_problems,
    gpu_problems,
    net_problems,
    parse_checks,
    segment_problems,
)
from megatron_ft.errors import ConfigError
from megatron_ft.link.linux import kernel_facts, nvml

XID = "6,1405,98,-;NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', GPU has fallen off the bus."


def test_names_of_checks_are_kept_once() -> None:
    assert parse_checks("gpu, disk,gpu") == ("gpu", "disk")
    assert parse_checks("storage:/ck,disk:/tmp,net") == ("storage:/ck", "disk:/tmp", "net")


@pytest.mark.parametrize(
    ("text", "hint"), [("gpus", "did you mean 'gpu'"), ("gpu:/x", "only disk and storage"), ("disk:x", "only disk")]
)
def test_unknown_check_is_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        parse_checks(text)


def devices(monkeypatch: pytest.MonkeyPatch, found: list[list[str]] | None, *log: str) -> None:
    """A node with these problems of its devices (None: no driver), and this log of the kernel."""
    monkeypatch.setattr(nvml, "load", lambda: None if found is None else "library")
    monkeypatch.setattr(nvml, "memory_problems", lambda _: found)
    monkeypatch.setattr(kernel_facts, "kernel_log", lambda: log)


def test_gpu_check_finds_missing_devices_and_pending_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, [[], []])
    assert gpu_problems(2) == []
    assert gpu_problems(3) == ["gpu: 2 devices for 3 ranks"]
    devices(monkeypatch, [[], ["needs a reset", "fails"]])
    assert gpu_problems(0) == ["gpu: device 1 needs a reset", "gpu: device 1 fails"]
    devices(monkeypatch, None)
    assert gpu_problems(0) == ["gpu: there is no NVIDIA driver (libnvidia-ml.so.1)"]


def test_xids_in_the_kernels_log_are_gpu_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, [], XID.format(79), "6,1,1,-;eth0: link is up", *map(XID.format, (31, 79, 48)))
    assert gpu_problems(0) == ["gpu: Xid 79, 48 in the kernel's log since the node booted"]
    devices(monkeypatch, [], XID.format(31))
    assert gpu_problems(0) == []


def test_disk_check_finds_a_directory_with_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = LEAST_FREE_BYTES
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    assert directory_problems("disk", str(tmp_path)) == []
    free_bytes -= 1 << 20
    told = f"storage: 1023 MiB free in {tmp_path}, 1024 MiB are needed"
    assert directory_problems("storage", str(tmp_path)) == [told]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("interfaces", "ports", "problems"),
    [
        ({"tun0": "unknown", "eth1": "down"}, {"a": ("4: ACTIVE", "5: LinkUp"), "b": ("1: DOWN", "3: Disabled")}, []),
        ({"lo": "unknown", "eth1": "down"}, {}, ["net: no network interface is up"]),
        (
            {"eth0": "up"},
            {"a": ("4: ACTIVE", "5: LinkUp"), "b": ("2: INIT", "5: LinkUp")},
            ["net: port b/1 is INIT, although its cable is connected"],
        ),
        ({"eth0": "up"}, {"a": ("1: DOWN", "3: Disabled")}, ["net: none of 1 InfiniBand port is active"]),
    ],
)
def test_net_check_finds_interfaces_and_ports_that_are_down(
    interfaces: dict[str, str],
    ports: dict[str, tuple[str, str]],
    problems: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_health, "_SYS", tmp_path)
    for name, state in interfaces.items():
        (tmp_path / "class/net" / name).mkdir(parents=True)
        (tmp_path / "class/net" / name / "operstate").write_text(f"{state}\n")
    for name, states in ports.items():
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        for file, state in zip(("state", "phys_state"), states, strict=True):
            (port / file).write_text(f"{state}\n")
    assert net_problems() == problems


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", None), ("node07,node08", ": node07,node08"), ("\n ECC errors \nmore", ": ECC errors"), ("\n", "")],
)
def test_segment_is_kept_out_by_a_file_that_is_not_empty(text: str, reason: str | None, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    problems = [] if reason is None else [f"segment: marked as unhealthy by {file}{reason}"]
    assert segment_problems(str(file)) == problems
