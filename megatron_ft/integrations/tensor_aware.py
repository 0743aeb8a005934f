"""State dicts whose tensors can be told from the rest: the interface of Megatron-LM's, and the simplest of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, ValuesView
from typing import Any

import torch


class TensorAwareStateDict(ABC):
    """State dict whose tensors can be taken out; the rest is "hollow" then."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out, and remember what it takes to make others like them."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in the order of ``pop_tensors``."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """True while the tensors are taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors where those were that ``pop_tensors`` took out."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put uninitialised tensors where those were that ``pop_tensors`` took out."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace each tensor by a copy on the CPU."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor back to the device from which ``copy_tensors_to_cpu`` copied it."""

    def values(self) -> ValuesView[Any]:
        """Return the attributes."""
        return vars(self).values()


class _Hollow:
    """Stands for a tensor that was taken out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """State dict with CUDA tensors in nested dicts and lists; it is changed in place."""

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        assert all(tensor.is_cuda for tensor in self.tensors), "all tensors must be on a CUDA device"

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    @property
    def tensors(self) -> list[torch.Tensor]:
        assert not self._is_hollow, "the tensors are taken out"
        return _replace(self.state_dict, torch.Tensor, lambda each: each)

    def pop_tensors(self) -> list[torch.Tensor]:
        assert not self._is_hollow, "the tensors are taken out"
        self._is_hollow = True
        return _replace(self.state_dict, torch.Tensor, _Hollow)

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        assert self._is_hollow, "no tensors are taken out"
        rest = iter(tensor_data)
        _replace(self.state_dict, _Hollow, lambda _: next(rest))
        self._is_hollow = False

    def init_tensors(self) -> None:
        assert self._is_hollow, "no tensors are taken out"
        _replace(self.state_dict, _Hollow, _Hollow.empty)
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._move("cpu", non_blocking)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self._move("cuda", non_blocking)

    def _move(self, device: str, non_blocking: bool) -> None:
        assert not self._is_hollow, "the tensors are taken out"
        _replace(self.state_dict, torch.Tensor, lambda each: each.to(device, non_blocking=non_blocking))


def _replace(value: Any, kind: type, make: Callable[[Any], Any]) -> list[Any]:
    """Replace all values of a type in nested dicts and lists, always in the same order. Return those replaced."""
    found = []
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(each, (dict, list)):
            found += _replace(each, kind, make)
        elif isinstance(each, kind):
            found.append(each)
            value[key] = make(each)
    return found
