"""What this torch lacks of the names that the launcher needs is found at its start."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext

from megatron_ft.launcher.torch_compat.private_names import missing_essentials


def test_this_torch_has_them_all() -> None:
    assert missing_essentials() == []


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
def test_one_that_is_not_there_is_named(
    owner: type, name: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    assert missing_essentials() == missing
