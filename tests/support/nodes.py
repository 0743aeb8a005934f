"""Several launchers of one job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.support.launching import Finished, Launched, Launcher, command_line, free_port

__all__ = [
    "TRAINS_UNTIL_TOLD",
    "coordinator_of",
    "cycles_of",
    "meeting_place",
    "rendezvous_settings",
    "tell",
    "wait_for_all",
]

TRAINS_UNTIL_TOLD = """
import pathlib
WHERE = pathlib.Path(sys.argv[1])
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "at", time.monotonic())
while not (WHERE / "finish").exists():
    if (WHERE / f"fail-{CYCLE}-{RANK}").exists():
        sys.exit(7)
    time.sleep(0.02)
"""
"""Script of a rank that runs until its directory has a file ``finish``, or ``fail-CYCLE-RANK`` for this rank."""


def meeting_place(*more: str) -> list[str]:
    """Options with which launchers on this machine meet, at a free port."""
    port = free_port()
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port}"
    return ["--rdzv-backend=c10d", endpoint, f"--rdzv-id=job{port}", "--local-addr=127.0.0.1", *more]


def rendezvous_settings(*, is_host: bool | None = None, last_call_s: int = 30) -> str:
    """The option for how nodes meet; ``is_host`` as torch has it: whether the job begins at this launcher.

    ``last_call_s`` is how long a round that has its minimum waits for more: longer than launchers that are started
    together differ, and no longer than a test has time for when one of them is gone for good.
    """
    host = "" if is_host is None else f",is_host={int(is_host)}"
    return f"--rdzv-conf=last_call_timeout={last_call_s}{host}"


def tell(launcher: Launcher, name: str) -> None:
    """Make that file in the directory that ranks look into."""
    (launcher.directory / name).touch()


def cycles_of(launched: Launched) -> list[str]:
    """Numbers of the cycles that a rank of this node has said."""
    return re.findall(r"^cycle (\d+) of", launched.out, re.MULTILINE)


def coordinator_of(node: Launched) -> int | None:
    """The process id of the coordinator that this launcher has started, if one runs."""
    pids = [stat.pid for stat in node.alive() if "megatron_ft.job" in " ".join(command_line(stat.pid))]
    return pids[0] if pids else None


def wait_for_all(nodes: Sequence[Launched]) -> list[Finished]:
    """Until all have ended, with nothing left behind."""
    ended = [node.wait() for node in nodes]
    for node in nodes:
        node.assert_nothing_left()
    return ended
