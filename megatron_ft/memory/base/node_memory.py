"""Memory of this node, and the limits of this process's cgroups, v1 and v2, up the tree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from megatron_ft.memory.rules.retention import Limit

_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_UNLIMITED = 1 << 60


def node_memory(proc: str = "/proc") -> list[Limit]:
    """Return the memory of the node and all limits that hold for this process.

    Raises:
        OSError: /proc can't be read.
    """
    facts = _table(f"{proc}/meminfo")
    of_node = Limit(facts["MemAvailable:"] * 1024, facts["MemTotal:"] * 1024, "available on the node")
    return [of_node, *_limits(proc)]


def _limits(proc: str) -> Iterator[Limit]:
    with contextlib.suppress(OSError), open(f"{proc}/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            is_v2 = controllers == ""
            if is_v2 or "memory" in controllers.split(","):
                for mount, root in _mounts(proc, is_v2=is_v2):
                    yield from _up(mount, _below(path, root), _V2 if is_v2 else _V1)


def _mounts(proc: str, *, is_v2: bool) -> Iterator[tuple[str, str]]:
    """Yield mount points, and the cgroup that is seen at each."""
    with contextlib.suppress(OSError), open(f"{proc}/self/mountinfo") as file:
        for line in file:
            mounted, _, of = line.partition(" - ")
            kind, _, rest = of.partition(" ")
            options = rest.rpartition(" ")[2]  # what was mounted comes before, and may be empty
            if kind == "cgroup2" if is_v2 else kind == "cgroup" and "memory" in options.strip().split(","):
                fields = mounted.split()
                yield fields[4], fields[3]


def _below(path: str, root: str) -> str:
    """Return a cgroup's path below a mount of ``root``; "/" if it isn't seen there: in a container its own is."""
    relative = os.path.relpath(path, root)
    return "/" if relative.startswith("..") else os.path.normpath(f"/{relative}")


def _up(mount: str, path: str, names: tuple[tuple[str, ...], str, tuple[str, ...]]) -> Iterator[Limit]:
    limit_names, used_name, reclaimable = names
    while True:
        place = os.path.join(mount, path.lstrip("/"))
        for limit_name in limit_names:
            with contextlib.suppress(OSError, ValueError):  # no such file at the root, or "max"
                limit, used = _number(f"{place}/{limit_name}"), _number(f"{place}/{used_name}")
                if limit < _UNLIMITED:
                    stat = _table(f"{place}/memory.stat")
                    used -= sum(stat.get(each, 0) for each in reclaimable)  # page cache
                    yield Limit(limit - used, limit, f"left by {limit_name} of cgroup {path}")
        if path == "/":
            return
        path = os.path.dirname(path)


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _table(path: str) -> dict[str, int]:
    with open(path) as file:
        return {words[0]: int(words[1]) for words in map(str.split, file)}
