"""What ready checks find wrong with a node."""

from __future__ import annotations

import pytest

from megatron_ft.errors import Refused
from megatron_ft.link.base.node_problems import (
    LEAST_FREE_BYTES,
    Gpu,
    Port,
    directory_problems,
    gpu_problems,
    lustre_problems,
    net_problems,
    network_mounts,
    parse_checks,
    segment_file,
    segment_problems,
    xids,
)

XID = "6,1405,98,-;NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', GPU has fallen off the bus."
UP = Port(name="mlx5_0/1", link="ACTIVE", cable="LinkUp")


def test_names_of_checks_are_kept_once() -> None:
    assert parse_checks("gpu, disk,gpu") == ("gpu", "disk")
    assert parse_checks("storage:/ck,disk:/tmp,nvidia-smi") == ("storage:/ck", "disk:/tmp", "nvidia-smi")


@pytest.mark.parametrize(
    ("text", "hint"), [("gpus", "did you mean 'gpu'"), ("gpu:/x", "only disk and storage"), ("disk:x", "only disk")]
)
def test_unknown_check_is_refused(text: str, hint: str) -> None:
    with pytest.raises(Refused, match=hint):
        parse_checks(text)


def test_gpu_check_finds_missing_devices_and_pending_repairs() -> None:
    sound = [Gpu(index=0, pages_pending=False), Gpu(index=1, rows_pending=False, rows_failed=False), Gpu(index=2)]
    assert gpu_problems(sound, [], ranks=3) == []
    assert gpu_problems(None, [], ranks=0) == ["gpu: there is no NVIDIA driver (libnvidia-ml.so.1)"]
    assert gpu_problems(sound[:1], [], ranks=2) == ["gpu: 1 device for 2 ranks"]
    assert gpu_problems([Gpu(index=3, pages_pending=True)], [], ranks=1)[0].startswith("gpu: device 3 needs a reset")
    assert gpu_problems([Gpu(index=4, rows_pending=True)], [], ranks=1)[0].startswith("gpu: device 4 needs a reset")
    assert gpu_problems([Gpu(index=5, rows_failed=True)], [], ranks=1)[0].startswith("gpu: device 5 has a row remap")


def test_xids_in_the_kernels_log_are_gpu_problems() -> None:
    log = [XID.format(79), "6,1,1,-;eth0: link is up", XID.format(31), XID.format(79), XID.format(48)]
    assert xids(log) == [79, 31, 79, 48]
    (told,) = gpu_problems([], log, ranks=0)
    assert told == "gpu: Xid 79, 48 in the kernel's log since the node booted"
    assert gpu_problems([], [XID.format(31)], ranks=0) == []


def test_disk_check_finds_a_directory_with_too_little_space() -> None:
    assert directory_problems("disk", "/ck", LEAST_FREE_BYTES) == []
    assert directory_problems("storage", "/ck", LEAST_FREE_BYTES - (1 << 20)) == [
        "storage: 1023 MiB free in /ck, 1024 MiB are needed"
    ]


def test_net_check_finds_interfaces_and_ports_that_are_down() -> None:
    unplugged = Port(name="mlx5_1/1", link="DOWN", cable="Disabled")
    assert net_problems(["eth0"], []) == net_problems(["eth0"], [UP, unplugged]) == []
    assert net_problems([], []) == ["net: no network interface is up"]
    hung = Port(name="mlx5_2/1", link="INIT", cable="LinkUp")
    assert net_problems(["eth0"], [UP, hung]) == ["net: port mlx5_2/1 is INIT, although its cable is connected"]
    assert net_problems(["eth0"], [unplugged]) == ["net: none of 1 InfiniBand port is active"]


def test_network_file_systems_are_found_among_the_mounts() -> None:
    mountinfo = [
        "22 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
        "40 22 0:35 / /home rw shared:20 - nfs4 server:/home rw,vers=4.2",
        "41 22 0:36 / /scratch\\040a rw shared:21 master:1 - lustre mgs:/scratch rw",
        "42 22 0:35 /x /home rw shared:20 - nfs4 server:/home rw",
        "43 22 0:37 / /tmp rw - tmpfs tmpfs rw",
        "a line that is none",
    ]
    assert network_mounts(mountinfo) == ["/home", "/scratch a"]


@pytest.mark.parametrize(
    ("health", "problems"),
    [("", []), ("healthy", []), ("NOT HEALTHY\nx", ["mounts: Lustre says that it is 'NOT HEALTHY'"])],
)
def test_lustre_that_is_not_healthy_is_a_problem(health: str, problems: list[str]) -> None:
    assert lustre_problems(health) == problems


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"SLURM_ARRAY_TASK_ID": "7"}, ""),
        ({"SLURM_JOB_ID": "20"}, "segment_health_check.20.20"),
        (
            {"SLURM_JOB_ID": "20", "SLURM_ARRAY_JOB_ID": "13", "SLURM_ARRAY_TASK_ID": "7"},
            "segment_health_check.13.7",
        ),
    ],
)
def test_file_of_a_segment_is_named_as_by_the_reference(environ: dict[str, str], name: str) -> None:
    assert segment_file(environ) == name


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", []),
        ("node07,node08", ["segment: marked as unhealthy by /d/f: node07,node08"]),
        ("\n ECC errors \nmore", ["segment: marked as unhealthy by /d/f: ECC errors"]),
        ("\n", ["segment: marked as unhealthy by /d/f"]),
    ],
)
def test_segment_is_kept_out_by_a_file_that_is_not_empty(text: str, problems: list[str]) -> None:
    assert segment_problems("/d/f", text) == problems
