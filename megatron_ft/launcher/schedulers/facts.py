"""The scheduler's facts about this launcher's job, nodes and endpoint. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerEnvironment:
    """Facts about the job. Empty texts and None are unknown; nothing here was given by the user.

    Args:
        scheduler: its value of ``--scheduler``; "none" without one.
        job: for people: "job 4711 step 0 restart 1".
        life: distinguishes this start of the job from all others, for launchers of any step.
        run_id: distinguishes this step, too: the rendezvous id.
        nodes: number of nodes with a launcher.
        launchers: number of launchers started, none of which is restarted when it has ended; 0: unknown.
        endpoint: host and port of the first of them.
        log_name: name of a directory for all nodes and starts of one training.
        own_log_name: name of that directory if this launcher's training is one of several started together.
        surplus: why some launchers would stand in each other's way, if not each is meant as a node.
        warnings: settings of the scheduler that defeat recovery.
        hint: why only one launcher runs, if the job has several nodes and the user seems to have forgotten the others.
        save_signals: signals that users request before the end of the time limit.
        stopped_code: exit code of a launcher that was asked to stop; None: decided by how its ranks have ended.
        are_pods: launchers are restarted one by one, each has an output of its own, and a file for why it ended;
        they are killed 30 s after SIGTERM, unless the user has told the scheduler otherwise.
    """

    scheduler: str = "none"
    job: str = ""
    life: str = ""
    run_id: str = ""
    nodes: int | None = None
    launchers: int = 0
    endpoint: str = ""
    log_name: str = ""
    own_log_name: str = ""
    surplus: str = ""
    warnings: tuple[str, ...] = ()
    hint: str = ""
    save_signals: tuple[signal.Signals, ...] = ()
    stopped_code: int | None = None
    are_pods: bool = False


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of these variables that is a whole number."""
    return next((int(value) for name in names if (value := environ.get(name, "")).isdecimal()), None)
