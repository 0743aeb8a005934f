"""Before a node joins a round: whether it is fit, by the user's command; it stands aside until it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.standing_aside import is_told, retry_delay_s
from megatron_ft.launcher import departure, lines, node_lines, torch_rendezvous
from megatron_ft.launcher.health_check import Checked, HealthCheck
from megatron_ft.launcher.job_errors import NodeNotNeededError
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.rounds import LOOK_ASIDE_S, cycles_begun, note_aside

__all__ = ["Fitness"]

_EXIT_BARRIER_S = 2.0
"""So long the host of the rendezvous stays when the job has ended: the nodes that ran it meet in it once more."""


class Fitness:
    """Of one launcher's node."""

    def __init__(self, node: Node, handler: Any, health: HealthCheck, *, ranks: int) -> None:
        self._node = node
        self._handler = handler
        self._health = health
        self._ranks = ranks
        self._is_aside = False

    def wait_for(self, *, own_count: int, check: Callable[[], None], stand_aside: Callable[[], None]) -> None:
        """Return when the node is fit. ``check`` is called after each event.

        ``own_count`` is the number of the cycle that comes, where the store can't be asked for it. ``stand_aside`` is
        called once, when the others are to do without this node.

        Raises:
            NodeNotNeededError: the job has ended meanwhile.
            FaultToleranceError: no node is there, for as long as a round waits for missing ones.
            RendezvousError: the host of the rendezvous is gone.
            whatever ``check`` raises.
        """
        try:
            self._wait_until_fit(own_count, check, stand_aside)
        except NodeNotNeededError:
            raise  # which the host of the rendezvous waits for
        except BaseException:
            self._take_back()
            raise

    def _wait_until_fit(self, own_count: int, check: Callable[[], None], stand_aside: Callable[[], None]) -> None:
        failures, last, nobody_since_s = 0, "", time.monotonic()
        while not (checked := self._look(own_count, check)).is_good:
            failures += 1
            if failures == 1:
                stand_aside()
                # before it steps out: from then on the others may run the job to its end, and need to know who asks
                self._node.blocking(lambda: note_aside(self._handler, 1))
                self._is_aside = True
                departure.step_out(self._node, self._handler)
                nobody_since_s = time.monotonic()
            delay_s = retry_delay_s(failures)
            if is_told(failures, is_new=checked.ended != last):
                self._node.say(lines.unfit(checked.ended, checked.last_line, retry_s=delay_s))
            last = checked.ended
            nobody_since_s = self._wait(delay_s, nobody_since_s, check)
        if failures:
            self._take_back()
            self._node.say(lines.fit_again(failures))

    def _take_back(self) -> None:
        """Not aside any more."""
        if self._is_aside:
            self._is_aside = False
            departure.briefly(self._node, lambda: note_aside(self._handler, -1))

    def _look(self, own_count: int, check: Callable[[], None]) -> Checked:
        node = self._node
        begun = node.blocking(lambda: cycles_begun(self._handler))
        cycle = own_count if begun is None else begun
        environment = {
            "FT_CYCLE": str(cycle),
            "TORCHELASTIC_RUN_ID": node.line.run_id,
            "LOCAL_WORLD_SIZE": str(self._ranks),
        }
        checked = self._health.run(environment, check)
        node.log.write(
            "node_health",
            cycle=cycle,
            good=checked.is_good,
            exit_code=checked.code,
            text=checked.ended,
            last_line=checked.last_line,
            seconds=checked.seconds,
        )
        return checked

    def _wait(self, delay_s: float, nobody_since_s: float, check: Callable[[], None]) -> float:
        """Until the next look; since when no node is there."""
        node, until_s = self._node, time.monotonic() + delay_s
        bound_s = torch_rendezvous.join_timeout_s(self._handler)
        while time.monotonic() < until_s:
            nodes = node.blocking(lambda: torch_rendezvous.nodes_in_rendezvous(self._handler))
            if nodes is None:
                if departure.hosts(self._handler):
                    node.reactor.run_until(
                        lambda: bool(node.signals.received), deadline_s=time.monotonic() + _EXIT_BARRIER_S
                    )
                raise NodeNotNeededError(node_lines.ENDED_WHILE_ASIDE)
            if nodes:
                nobody_since_s = time.monotonic()
            elif time.monotonic() - nobody_since_s > bound_s:
                raise FaultToleranceError(lines.unfit_for_good(bound_s))
            next_look_s = min(until_s, time.monotonic() + LOOK_ASIDE_S)
            while (left_s := next_look_s - time.monotonic()) > 0:
                check()
                node.reactor.run_once(left_s)
        return nobody_since_s
