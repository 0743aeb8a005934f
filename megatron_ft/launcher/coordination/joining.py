"""The launcher takes its part in the control plane of its job, and gives it back at the end."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import uuid
from collections.abc import Callable, Iterator

from torch.distributed.launcher.api import LaunchConfig

from megatron_ft.core.job.member import Identity
from megatron_ft.ipc.secret import read_secret
from megatron_ft.launcher.coordination import rendezvous
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.coordination.host import Host
from megatron_ft.launcher.coordination.meeting_place import Kind, MeetingPlace
from megatron_ft.launcher.coordination.rank_store import RankStore
from megatron_ft.launcher.coordination.transport import InProcess
from megatron_ft.launcher.node import Node

__all__ = ["joined"]

_HERE = "this process"
"""The address of a coordinator that is one."""


@contextlib.contextmanager
def joined(node: Node, place: MeetingPlace, config: LaunchConfig) -> Iterator[Coordination]:
    """Be a member of the job, and have torch's agent meet by what the coordinator decides.

    Raises:
        ConfigError: the secret or the endpoint can't be used.
    """
    store = RankStore(local_addr=config.local_addr, address=place.ranks_store)
    if place.kind is not Kind.COORDINATED:
        coordination = _alone(node, place, store if place.kind is Kind.ALONE else None)
        end: Callable[[], None] = coordination.close
    else:
        coordination, end = _coordinated(node, place, store, config)
    if place.kind is not Kind.TORCH:
        rendezvous.register(config, coordination=coordination, store=store)
    coordination.start()
    try:
        yield coordination
    finally:
        store.close()
        end()


def _alone(node: Node, place: MeetingPlace, store: RankStore | None) -> Coordination:
    coordination = Coordination(
        _identity(place, _HERE, (_HERE,)),
        transport=lambda listener: InProcess(node.reactor, listener),
        open_store=(lambda: "") if store is None else store.open,
        reactor=node.reactor,
        say=node.say,
    )
    coordination.member.owns(_HERE)
    return coordination


def _identity(place: MeetingPlace, address: str, endpoints: tuple[str, ...]) -> Identity:
    return Identity(
        job=place.job,
        rules=place.rules,
        instance=uuid.uuid4().hex,
        name=socket.gethostname(),
        address=address,
        endpoints=endpoints,
        rank=place.rank,
    )
