"""Any object as a memory checkpoint: its tensors as they are, the rest as a pickle under the job's MAC.

The key of the MAC comes from the keeper, never through the environment. Nothing is unpickled whose MAC wasn't compared:
one of another job or rank is a SnapshotError.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import pickle
from typing import Any

from megatron_ft.errors import SnapshotError
from megatron_ft.memory.rank import restoring, saving
from megatron_ft.memory.rank.copying import why_unfit
from megatron_ft.memory.rank.keeper_connection import KeeperConnection, Place, RefusedError, usable_place
from megatron_ft.memory.rank.state_tree import is_tensor
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base import say

_PICKLE, _MAC, _LABEL, _TENSORS = "pickle", "mac", "label", "tensors"
_CONNECT_S = 10.0
"""Seconds to wait for the keeper once, which may just have been started."""


def save(iteration: int, value: object, label: str) -> None:
    """Begin to save; ``label`` tells the objects of one caller from those of others.

    Raises:
        SnapshotError: the object can't be kept.
    """
    place = usable_place()
    key = "" if place is None else _key(place)
    if place is not None and key:
        saver = saving.saver(place)
        state = pack(value, key, _about(place, saver.key_of(iteration), label))
        saver.save(iteration, {**state, _LABEL: label}, 1)


def available(label: str) -> dict[int, SnapshotKey]:
    """Return the snapshots that this rank can load, by iteration, once none is on its way any more.

    Those are the one that was chosen for the cycle, and the newest one of this process. One that isn't of this job, or
    that can't be read, is left out with a line.
    """
    place = usable_place()
    if place is None:
        return {}
    keys = [] if place.restore is None else [place.restore]
    if saving.running is not None:
        saving.running.wait()
        if saving.running.verified is not None:
            keys.insert(0, saving.running.verified)
    if not keys:
        _key(place)  # the keeper starts now rather than at the first save
    found: dict[int, SnapshotKey] = {}
    for key in keys:
        try:
            state = restoring.read(place, key, (_LABEL, _MAC, _PICKLE))
            if state.get(_LABEL) == label:
                _check(state, KeeperConnection.pickle_key, _about(place, key, label))
                found[key.iteration] = key
        except (OSError, SnapshotError, RuntimeError) as error:  # RuntimeError: torch's
            if not (isinstance(error, RefusedError) and found):  # else it has given way to a newer one
                say.warn_of_rank(f"the memory checkpoint of iteration {key.iteration} isn't used: {error}")
    return found


def load(key: SnapshotKey, label: str) -> Any:
    """Return the object of a snapshot that is `available`. If it was chosen for the cycle, the launcher is told.

    Raises:
        SnapshotError: it can't be had.
        OSError: it can't be read.
    """
    place = usable_place()
    if place is None:
        raise SnapshotError("this rank has no keeper")
    state: dict[str | int, Any] = {}
    if key == place.restore:
        restoring.restore(place, key, state)
    else:
        state = restoring.read(place, key)
    return unpack(state, KeeperConnection.pickle_key, _about(place, key, label))


def _about(place: Place, key: SnapshotKey, label: str) -> str:
    info = place.info
    at = f"cycle {key.cycle}, era {key.era}, iteration {key.iteration}"
    return f"rank {info.global_rank} of {info.world_size}, {at}, {label!r}"


def _key(place: Place) -> str:
    """Return the key of the MAC; empty, with a line, if no keeper has one."""
    if not KeeperConnection.pickle_key:
        with contextlib.closing(KeeperConnection(place)) as connection:
            try:
                connection.open(_CONNECT_S, must=False)
            except SnapshotError as error:
                say.warn_of_rank(f"no memory checkpoint is saved: {error}")
    return KeeperConnection.pickle_key


# -- the pickle ---------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Leaves out the tensors that a segment can hold."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, str, bool, bool] | None:
        if not is_tensor(value) or why_unfit(value):  # those are pickled
            return None
        import torch

        at = self._places.setdefault(id(value), len(self.tensors))
        if at == len(self.tensors):
            self.tensors.append(value)
        return at, value.device.type, isinstance(value, torch.nn.Parameter), value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        import torch

        at, device, is_parameter, requires_grad = pid
        tensor = self._tensors[at].to(device)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad)


def pack(value: object, key: str, about: str) -> dict[str, Any]:
    """Return a state that can be saved. ``about``: what the MAC says beside the content."""
    import torch

    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SnapshotError(f"the state can't be pickled: {error}") from None
    raw = file.getvalue()
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return {_PICKLE: tensor, _MAC: _mac(raw, key, about), _TENSORS: pickler.tensors}


def unpack(state: dict[str | int, Any], key: str, about: str) -> Any:
    """Return the object. Its pickle is read only if the MAC is this job's."""
    raw = _check(state, key, about)
    return _Unpickler(io.BytesIO(raw), state[_TENSORS]).load()


def _check(state: dict[str | int, Any], key: str, about: str) -> bytes:
    """Return the bytes of the pickle."""
    tensor: Any = state.get(_PICKLE)
    mac = state.get(_MAC)
    if not key or not is_tensor(tensor) or not isinstance(mac, str):
        raise SnapshotError("it has no MAC of this job")
    raw: bytes = tensor.numpy().tobytes()
    if not hmac.compare_digest(mac.encode(), _mac(raw, key, about).encode()):
        raise SnapshotError("its MAC isn't this job's; without FT_SECRET, each launcher has a key of its own")
    return raw


def _mac(raw: bytes, key: str, about: str) -> str:
    found = hmac.new(key.encode(), f"megatron_ft 1 pickle, {about}\0".encode(), "sha256")
    found.update(raw)
    return found.hexdigest()
