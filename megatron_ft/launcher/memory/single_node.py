"""Memory checkpoints of a job of one node: this launcher itself chooses what a cycle restores.

The one file that knows no coordinator. A job of several nodes has no memory checkpoints yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_ft.core.memory.snapshots import Kept, SnapshotKey
from megatron_ft.core.messages.keeper import RankRestored, RestoreFailed, Saved
from megatron_ft.core.run_ahead import KEEPER_SOCKET_VARIABLE, RESTORE_VARIABLE
from megatron_ft.ipc.memory import digests
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.memory.keeper import Keeper, KeeperEvent

_MOST_TRIES = 2
"""Number of cycles that restore the same snapshot before it is taken for bad."""


class SingleNodeMemory:
    """The keeper, and the choice of a snapshot between two cycles."""

    def __init__(self, reactor: Reactor, path: str, *, say: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._say = say
        self.keeper = Keeper(reactor, path, xxhash=digests.find_module(), say=say, on_event=self._hear)
        self._chosen: SnapshotKey | None = None
        self._tries = 0
        self._waiting: set[int] = set()
        """Ranks of this cycle that haven't restored yet."""

    def before_ranks(
        self, cycle: int, ranks: Sequence[int], envs: Mapping[int, dict[str, str]], check: Callable[[], None]
    ) -> None:
        """Choose what the cycle restores, prepare the keeper, and add the variables to those of the ranks.

        ``check`` is called during the wait for the keeper's stock, and may raise.
        """
        stock: list[Kept] = []
        self.keeper.take_stock(stock.append)

        def is_known() -> bool:
            check()
            return bool(stock)

        self._reactor.run_until(is_known)
        world = int(envs[0]["WORLD_SIZE"])
        restore = self._choose(newest(stock[0], ranks, world))
        self._waiting = set() if restore is None else set(ranks)
        self.keeper.prepare(cycle, ranks, world, restore)
        for env in envs.values():
            env.update(self.keeper.variables())

    def _choose(self, key: SnapshotKey | None) -> SnapshotKey | None:
        self._tries = self._tries + 1 if key is not None and key == self._chosen else 1
        self._chosen = key
        if key is None or self._tries <= _MOST_TRIES:
            return key
        self._say(
            f"the memory checkpoint of iteration {key.iteration} was restored {_MOST_TRIES} times: not used again"
        )
        return None

    def _hear(self, event: KeeperEvent) -> None:
        match event:
            case Saved(key):
                self.keeper.complete(key)  # this node's ranks are all ranks
            case RankRestored(key, _, rank):
                self._waiting.discard(rank)
                if not self._waiting:
                    self._say(f"restored iteration {key.iteration} from memory")
            case RestoreFailed(key, why, rank):
                self._say(f"rank {rank} can't restore iteration {key.iteration} from memory: {why}")


def say_none(envs: Mapping[int, dict[str, str]]) -> None:
    """Tell the ranks of a job of several nodes that there is no keeper."""
    for env in envs.values():
        env.update({KEEPER_SOCKET_VARIABLE: "", RESTORE_VARIABLE: ""})


def newest(kept: Kept, ranks: Sequence[int], world: int) -> SnapshotKey | None:
    """Return the newest snapshot of which these ranks all have a verified segment; None if there is none."""
    fitting = [each.key for each in kept.snapshots if each.world == world and set(ranks) <= set(each.ranks)]
    return max(fitting, default=None)
