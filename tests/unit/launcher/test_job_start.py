"""What all launchers of a job would say alike at their start is said by the first node's."""

from __future__ import annotations

import os
from unittest import mock
from unittest.mock import Mock

import pytest

from megatron_ft.launcher import job
from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.coordination import meeting_place as meeting_places

JOB = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=first:1")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM_", "KUBERNETES_", "JOB_"))]:
        monkeypatch.delenv(name)


def said(*options: str, here: bool = False) -> list[str]:
    """The beginnings of the lines."""
    told: list[str] = []
    line = parse([*options, __file__])
    with mock.patch.multiple(meeting_places, is_this_machine=Mock(return_value=here), check_name=Mock()):
        place = meeting_places.meeting_place(line, {})
    announce = job.say_start(line, place, "/nowhere", told.append)
    announce("ranks are forked")
    return [text.partition(" ")[0] for text in told if not text.startswith("warning: ")]


ALL = ["configuration:", "logs:", "ranks"]


@pytest.mark.parametrize(
    ("options", "here", "lines"),
    [
        ((), False, ALL),
        ((*JOB, "--node-rank=0"), False, ALL),
        (JOB, True, ALL),
        ((*JOB, "--rdzv-conf=is_host=1"), False, ALL),
        ((*JOB, "--node-rank=1", "--ft-log-dir=/nowhere"), False, []),
        ((*JOB, "--ft-log-dir=/nowhere"), False, []),
        ((*JOB, "--node-rank=1"), False, ["logs:"]),
    ],
)
def test_start_lines_are_said_by_the_first_node_unless_they_differ(
    options: tuple[str, ...], here: bool, lines: list[str]
) -> None:
    assert [each for each in said(*options, here=here) if each in ALL] == lines
