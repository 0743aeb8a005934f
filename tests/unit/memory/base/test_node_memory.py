"""Memory of the node and limits of cgroups, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.memory.base.node_memory import node_memory
from megatron_ft.memory.rules.retention import Limit

MEMINFO = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\nHugePages_Total: 0\n"


def proc(tmp_path: Path, cgroup: str, mounts: str) -> str:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "self" / "mountinfo").write_text(mounts)
    return str(tmp_path)


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


def test_memory_of_this_node_is_read() -> None:
    assert 0 < node_memory()[0].left_bytes < node_memory()[0].of_bytes


def test_limits_of_version_2_are_read_up_the_tree(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    stat = "anon 1\ninactive_file 30\nactive_file 12\n"
    group(top)
    group(top / "a", memory__max="5000\n", memory__current="700\n", memory__stat=stat)
    group(top / "a" / "b", memory__max="max\n", memory__current="600\n", memory__stat=stat)
    mounts = f"30 20 0:26 / {top} rw - cgroup2 cgroup2 rw\n"
    found = node_memory(proc(tmp_path, "0::/a/b\n", mounts))
    assert found[0][:2] == (400 * 1024, 1000 * 1024)
    assert found[1:] == [Limit(4342, 5000, "left by memory.max of cgroup /a")]


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    stat = "inactive_file 1\ntotal_inactive_file 5\ntotal_active_file 6\n"
    group(top, memory__limit_in_bytes=f"{2**63 - 4096}\n", memory__usage_in_bytes="9\n", memory__stat=stat)
    group(top / "job", memory__limit_in_bytes="3000\n", memory__usage_in_bytes="100\n", memory__stat=stat)
    mounts = f"31 20 0:27 / {top} rw - cgroup cgroup rw,memory\n32 20 0:28 / /x rw - cgroup cgroup rw,cpu\n"
    found = node_memory(proc(tmp_path, "5:cpu:/other\n4:memory:/job\n", mounts))
    assert found[1:] == [Limit(2911, 3000, "left by memory.limit_in_bytes of cgroup /job")]


@pytest.mark.parametrize(
    ("mounts", "cgroup", "limits"),
    [
        ("30 20 0:26 / {top} rw - cgroup2 cgroup2 rw\n", "0::/\n", {"max": 5000}),
        ("30 20 0:26 / {top} rw - cgroup2 cgroup2 rw\n", "0::/\n", {"max": 5000, "high": 4000}),
        # a mount with an empty source hides none
        ("29 20 0:25 / /tmp rw - tmpfs  rw\n30 20 0:26 / {top} rw - cgroup2  rw\n", "0::/\n", {"max": 5000}),
        # in a container its own group is the root
        ("30 20 0:26 /pod/7 {top} rw - cgroup2 cgroup2 rw\n", "0::/pod/7\n", {"max": 5000}),
    ],
)
def test_limits_of_the_root_of_version_2_are_read(
    tmp_path: Path, mounts: str, cgroup: str, limits: dict[str, int]
) -> None:
    top = tmp_path / "cgroup"
    files = {f"memory__{name}": f"{limit}\n" for name, limit in limits.items()}
    group(top, **files, memory__current="700\n", memory__stat="")
    found = node_memory(proc(tmp_path, cgroup, mounts.format(top=top)))
    names = [(f"left by memory.{name} of cgroup /", limit) for name, limit in limits.items()]
    assert found[1:] == [Limit(limit - 700, limit, name) for name, limit in names]
