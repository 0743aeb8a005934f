"""The part of the command line that the launcher's machine decides by."""

from __future__ import annotations

from megatron_ft.core.agent.turn import Options
from megatron_ft.core.exit_codes import TRY_AGAIN_CODE
from megatron_ft.launcher.base.command_line import CommandLine

__all__ = ["options_of"]


def options_of(line: CommandLine, *, meets_elsewhere: bool) -> Options:
    """``meets_elsewhere``: nodes meet by a rendezvous of torch's own."""
    given = line.options
    return Options(
        min_nodes=line.min_nodes,
        max_nodes=line.max_nodes,
        min_healthy=given.is_min_healthy,
        max_restarts=line.namespace.max_restarts,
        term_timeout_s=line.term_timeout,
        stop_timeout_s=line.stop_timeout,
        restart_grace_s=line.restart_grace,
        startup_timeout_s=given.startup_timeout,
        exit_timeout_s=given.exit_timeout,
        hang_signal=given.config.rank_termination_signal,
        observe_only=given.observe_only,
        ranks_are_python=line.ranks_are_python,
        meets_elsewhere=meets_elsewhere,
        checks_health=line.node_health_command is not None or bool(given.node_health),
        try_again_code=TRY_AGAIN_CODE,
        collectives_timeout_s=None if given.watch_collectives == "off" else given.watch_collectives_timeout,
        ends_for_collectives=given.watch_collectives == "end",
        says_all=line.says_all,
        shares_output=line.where.launchers > 0,  # srun's, unless it was told otherwise
    )
