"""Facts about a run that the hooks of a train loop store on the board for the monitor: no I/O, no wait.

The monitor uses them to decide when timeouts may be learned, outside this process. A client may be any object with the
public methods of :class:`RankMonitorClient`; a foreign client stores nothing.
"""

from __future__ import annotations

import time
from typing import Any

from megatron_ft.link.base import layout
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.records.event_log import EventLog

_END_S = 2.0
"""Seconds rank 0 waits at most at the end of its run for the confirmation that its timeouts are written."""
_LOOK_S = 0.005


def ours(client: Any) -> RankMonitorClient | None:
    """Return the client if it is of this package, so that its private parts may be used."""
    return client if isinstance(client, RankMonitorClient) else None


def note_save(client: RankMonitorClient) -> None:
    """Note that a persistent save has ended, and wake the monitor."""
    if client._recorder is not None:
        client._recorder.saved()
        client._wake_monitor()


def note_end(client: RankMonitorClient, *, waits: bool) -> bool | None:
    """Note that the run is over, and wake the monitor.

    ``waits``: wait up to `_END_S` for the launcher to confirm that the learned timeouts are written. Return True if
    they are, or without waiting; None without an answer.
    """
    recorder, board = client._recorder, client._board
    if recorder is None or board is None:
        return True
    recorder.set_facts(layout.FACT_RUN_ENDS)
    client._wake_monitor()
    if not waits:
        return True
    deadline = time.monotonic() + _END_S
    while not (word := board.words[layout.W_STATE_WRITTEN]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_S)
    return word == layout.STATE_WRITTEN


def learns(client: RankMonitorClient) -> bool:
    """Return True if the user's configuration asks for learned timeouts, whatever the script does."""
    return client.cfg is not None and client.cfg.learn == "on"


def log_fault(client: Any, fault_type: str, iteration: int | None) -> None:
    """Write a fault to an event log of this rank, and wait until it is written: the fault may end the rank now."""
    mine = ours(client)
    info = None if mine is None else mine.rank_info
    if mine is None or info is None or mine._log_dir is None:
        return
    who = {"rank": info.global_rank, "local_rank": info.local_rank, "cycle": info.cycle}
    name = f"{info.global_rank}-cycle{info.cycle}"
    log = EventLog.open(mine._log_dir, role="rank", run_id=mine._run_id, name=name, **who)
    log.write(FaultInjected(type=fault_type, rank=info.global_rank, iteration=iteration, cycle=info.cycle))
    log.close()


def current_iteration(client: Any) -> int | None:
    """Return the iteration that this rank reported last, None if it reported none. Thread-safe."""
    recorder = getattr(ours(client), "_recorder", None)
    return recorder._last_iteration if recorder is not None and recorder._last_iteration >= 0 else None
