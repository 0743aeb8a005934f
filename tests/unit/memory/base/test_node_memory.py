"""Memory of the node and limits of cgroups, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.memory.base.node_memory import node_memory
from megatron_ft.memory.rules.retention import Limit

MEMINFO = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\nHugePages_Total: 0\n"
V1 = "31 20 0:27 / {top} rw - cgroup cgroup rw,memory\n32 20 0:28 / /x rw - cgroup cgroup rw,cpu\n"
V2 = "30 20 0:26 / {top} rw - cgroup2 cgroup2 rw\n"
USED_V1 = {
    "memory.usage_in_bytes": "100\n",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 5\ntotal_active_file 6\n",
}
USED_V2 = {"memory.current": "700\n", "memory.stat": "anon 1\ninactive_file 30\nactive_file 12\n"}
ROOT = {"/": {**USED_V2, "memory.max": "5000\n"}}
ROOTS = [Limit(4342, 5000, "left by memory.max of cgroup /")]


@pytest.mark.parametrize(
    ("mounts", "cgroup", "groups", "limits"),
    [
        (
            V2,
            "0::/a/b\n",
            {"/": {}, "/a": {**USED_V2, "memory.max": "5000\n"}, "/a/b": {**USED_V2, "memory.max": "max\n"}},
            [Limit(4342, 5000, "left by memory.max of cgroup /a")],
        ),
        (
            V1,
            "5:cpu:/other\n4:memory:/job\n",
            {
                "/": {**USED_V1, "memory.limit_in_bytes": f"{2**63 - 4096}\n"},
                "/job": {**USED_V1, "memory.limit_in_bytes": "3000\n"},
            },
            [Limit(2911, 3000, "left by memory.limit_in_bytes of cgroup /job")],
        ),
        (
            V2,
            "0::/\n",
            {"/": {**ROOT["/"], "memory.high": "4000\n"}},
            [*ROOTS, Limit(3342, 4000, "left by memory.high of cgroup /")],
        ),
        # a mount with an empty source hides none
        ("29 20 0:25 / /tmp rw - tmpfs  rw\n30 20 0:26 / {top} rw - cgroup2  rw\n", "0::/\n", ROOT, ROOTS),
        # in a container its own group is the root
        ("30 20 0:26 /pod/7 {top} rw - cgroup2 cgroup2 rw\n", "0::/pod/7\n", ROOT, ROOTS),
    ],
)
def test_limits_of_both_versions_are_read_up_the_tree(
    tmp_path: Path, mounts: str, cgroup: str, groups: dict[str, dict[str, str]], limits: list[Limit]
) -> None:
    top = tmp_path / "cgroup"
    for path, files in groups.items():
        (top / path.lstrip("/")).mkdir(parents=True)
        for name, text in files.items():
            (top / path.lstrip("/") / name).write_text(text)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "self" / "mountinfo").write_text(mounts.format(top=top))
    assert node_memory(str(tmp_path)) == [Limit(400 * 1024, 1000 * 1024, "available on the node"), *limits]
