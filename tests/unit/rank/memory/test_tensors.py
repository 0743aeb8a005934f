"""Which tensors of a state may be read while training goes on, and which are copied at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ft.core.errors import SnapshotError
from megatron_ft.rank.memory.tensors import Optimizers, apart, gather


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Optimizers]:
    """A model after one step that was watched."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    watched = Optimizers(lambda: None)
    watched.watch()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer, watched


def names(sources: Any) -> set[str]:
    return {str(source.entry.path[-1]).rpartition(".")[2] for source in sources}


def test_tensor_is_read_later_only_if_an_optimizer_owns_it() -> None:
    model, optimizer, watched = trained()
    gathered = gather({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "other": torch.ones(3)})
    later, now = apart(gathered.sources, watched.owned())
    assert names(later) == {"weight", "bias", "exp_avg", "exp_avg_sq", "step"}
    assert names(now) == {"running_mean", "running_var", "num_batches_tracked", "other"}


def test_parameter_that_is_a_view_into_a_buffer_is_copied() -> None:
    buffer = torch.zeros(20)
    parameter = torch.nn.Parameter(buffer[:10])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    watched = Optimizers(lambda: None)
    watched.watch()
    parameter.sum().backward()
    optimizer.step()
    later, now = apart(gather({"p": parameter}).sources, watched.owned())
    assert (names(later), names(now)) == (set(), {"p"})


def test_every_step_is_announced_beforehand() -> None:
    model, calls = torch.nn.Linear(2, 2), []
    watched = Optimizers(lambda: calls.append(model.weight.detach().clone()))
    watched.watch()
    watched.watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(calls) == 1
    assert torch.equal(calls[0], before)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "a state is a dict"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"state\['a'\] is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, device="meta")}, r"on meta"),
        ({"a": torch.nn.Buffer(torch.ones(2)).as_subclass(type("Own", (torch.Tensor,), {}))}, r"is a Own"),
    ],
)
def test_tensor_of_an_unknown_kind_is_refused(state: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        gather(state)
