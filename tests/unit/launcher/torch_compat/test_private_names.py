"""What this torch lacks of the names that the launcher needs is found at its start."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext

from megatron_ft.launcher.torch_compat.private_names import missing_essentials, tail_logs


@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        (SimpleElasticAgent, "_rendezvous", ["LocalElasticAgent._rendezvous"]),
        (PContext, "_close", ["PContext._close"]),
        (
            LocalElasticAgent,
            "__init__",
            ["LocalElasticAgent._pcontext"],
        ),
    ],
)
def test_missing_private_name_of_torch_is_named(
    owner: type, name: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    assert missing_essentials() == missing


class _Torch26(PContext):
    """A context as torch 2.6 makes it."""

    def __init__(self) -> None:
        self.args = self.entrypoint = self.envs = self.error_files = self.nprocs = self.stderrs = self.stdouts = None
        self._stdout_tail, self._stderr_tail = "out", "err"


class _Torch213(PContext):
    """A context as torch 2.13 makes it."""

    def __init__(self) -> None:
        self._tail_logs = ["out", "err", "filtered"]


@pytest.mark.parametrize(("context", "expected"), [(_Torch26, ["out", "err"]), (_Torch213, ["out", "err", "filtered"])])
def test_copies_of_output_are_found_in_the_oldest_torch_and_in_the_newest(
    context: type[PContext], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "__abstractmethods__", frozenset())
    assert tail_logs(context()) == expected  # type: ignore[call-arg]


def test_oldest_torch_lacks_no_name_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PContext, "__init__", _Torch26.__init__)
    assert missing_essentials() == []
