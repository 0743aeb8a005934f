"""Ready checks: what is asked of the system, and what doesn't answer."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.node_health.__main__ import check
from megatron_ft.core.node_health import Gpu, Port
from megatron_ft.ipc.linux import node_facts, nvml
from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.processes import ready_checks


class Driver:
    """Of two devices: an older one with pages to retire, and a newer one with rows."""

    def __getattr__(self, name: str) -> Any:
        known = {
            "nvmlInit_v2": lambda: 0,
            "nvmlShutdown": lambda: 0,
            "nvmlDeviceGetCount_v2": lambda count: _set(0, count, 2),
            "nvmlDeviceGetHandleByIndex_v2": lambda index, device: _set(0, device, index.value + 1),
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda device, pages: _set(_ONLY[device.value == 1], pages, 1),
            "nvmlDeviceGetRemappedRows": lambda device, corrected, uncorrected, pending, failed: _set(
                _set(_set(_set(_ONLY[device.value == 2], corrected, 9), uncorrected, 1), pending, 0), failed, 1
            ),
        }
        if name not in known:
            raise AttributeError(name)
        return known[name]


_ONLY = {True: 0, False: 3}
"""What the driver answers: 3 is that the device knows nothing of it."""


def _set(code: int, reference: Any, value: int) -> int:
    reference._obj.value = value
    return code


def test_the_driver_is_asked_for_what_each_device_knows() -> None:
    old, new = nvml.gpus(Driver()) or []
    assert old == Gpu(index=0, pages_pending=True)
    assert new == Gpu(index=1, rows_pending=False, rows_failed=True)
    assert nvml.gpus(object()) is None


def test_the_kernels_files_of_links(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("lo", "unknown"), ("eth1", "down"), ("tun0", "unknown")):
        (tmp_path / "class/net" / name).mkdir(parents=True)
        (tmp_path / "class/net" / name / "operstate").write_text(f"{state}\n")
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("2: INIT\n")
    (port / "phys_state").write_text("5: LinkUp\n")
    assert node_facts.interfaces_up(tmp_path) == ["eth0", "tun0"]
    assert node_facts.ports(tmp_path) == [Port(name="mlx5_0/1", link="INIT", cable="LinkUp")]


def test_the_kernels_log_is_read_to_its_end_or_not_at_all(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;one\n6,2,2,-;two\n")
    assert node_facts.kernel_log(str(log)) == ["6,1,1,-;one", "6,2,2,-;two"]
    assert node_facts.kernel_log(str(tmp_path / "none")) == []


def test_one_that_does_not_answer_is_named_and_holds_up_no_other() -> None:
    began_s = time.monotonic()
    found = check([("disk: /nfs", lambda: time.sleep(600) or []), ("gpu", lambda: ["gpu: one"]), ("net", list)], 0.3)
    assert found == ["disk: /nfs doesn't answer within 0.3 s", "gpu: one"]
    assert time.monotonic() - began_s < 60


def test_a_directory_is_written_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["node-health", "disk", f"--directory={tmp_path}"]) == 0
    assert os.listdir(tmp_path) == []
    assert main(["node-health", f"disk,disk:{tmp_path}/none", f"--directory={tmp_path}"]) == 1
    assert capfd.readouterr().out == f"disk: {tmp_path}/none: No such file or directory\n"
    assert main(["node-health", "disc"]) == 2


def test_the_launchers_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))

    def command(*options: str) -> str | None:
        line = parse([*options, __file__])
        return ready_checks.command(line.options, line.node_health_command, log_dir=str(tmp_path), ranks=8)

    assert command() is None
    assert command("--ft-node-health-command=true") == "true"
    both = command("--ft-node-health=disk", "--ft-node-health-command=echo fine; exit 5")
    assert both is not None
    words = shlex.split(both.splitlines()[0])
    assert words[-6:] == ["disk", "--ranks=8", "--bound=48", f"--directory={tmp_path}", "||", "exit"]
    assert both.endswith("\necho fine; exit 5")
