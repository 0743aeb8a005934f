"""Before a node takes part in a cycle: whether it is fit, by the user's command; it stands aside until it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_ft.core.health_gate import is_told, retry_delay_s
from megatron_ft.core.records.launcher import NodeHealth
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes.health_command import Checked, HealthCheck

__all__ = ["wait_until_fit"]


def wait_until_fit(
    node: Node, health: HealthCheck, coordination: Coordination, *, ranks: int, check: Callable[[], None]
) -> None:
    """Return when the node is fit, and let the others do without it meanwhile.

    ``check`` is called after each event, and raises what ends the wait: the job may end, or the launcher be asked to.
    """
    failures, last = 0, ""
    while not (checked := _look(node, health, coordination, ranks, check)).is_good:
        failures += 1
        if failures == 1:
            coordination.aside(checked.ended)
        delay_s = retry_delay_s(failures)
        if is_told(failures, is_new=checked.ended != last):
            node.say(lines.unfit(checked.ended, checked.last_line, retry_s=delay_s))
        last, until_s = checked.ended, time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            check()
            node.reactor.run_once(left_s)
    if failures:
        node.say(lines.fit_again(failures))


def _look(
    node: Node, health: HealthCheck, coordination: Coordination, ranks: int, check: Callable[[], None]
) -> Checked:
    cycle = coordination.next_cycle
    environment = {
        "FT_CYCLE": str(cycle),
        "TORCHELASTIC_RUN_ID": node.line.run_id,
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    checked = health.run(environment, check)
    record = NodeHealth(
        cycle=cycle,
        good=checked.is_good,
        exit_code=checked.code,
        text=checked.ended,
        last_line=checked.last_line,
        seconds=checked.seconds,
    )
    node.log.write(record)
    return checked
