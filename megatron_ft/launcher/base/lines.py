"""Every line that ``ft_launcher`` prints, from facts. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from megatron_ft.core.diagnosis.exits import Cause, HangVerdict, describe_overdue
from megatron_ft.core.iterations import when
from megatron_ft.core.job.restart_policy import Action, Decision, Outcome
from megatron_ft.ipc.linux.processes import ProcessStat
from megatron_ft.launcher.base.signals import AGAIN_AFTER_S

PREFIX = "[ft_launcher] "
_SHOWN = 200
OBSERVING_ONLY = "observe-only: hung ranks are reported, not killed"

__all__ = [
    "OBSERVING_ONLY",
    "PREFIX",
    "asked_to_stop",
    "cannot_be_shared",
    "cycle_ended",
    "cycle_started",
    "did_not_end",
    "exit_code",
    "file_changed",
    "finished_late",
    "fit_again",
    "fork_server_replaced",
    "forked_at",
    "forwarded",
    "fresh_interpreters",
    "in_one_line",
    "job_went_on",
    "killing_at_once",
    "monitor_replaced",
    "no_more_fork_servers",
    "nodes_waiting",
    "observed",
    "paused",
    "preload_left_out",
    "rendezvous_failed",
    "resumed",
    "run_dir_lost",
    "run_dir_removed",
    "run_finished",
    "shut_down_between",
    "stopped",
    "stuck",
    "taken_for_lost",
    "training_again",
    "unfit",
    "user_mistake",
]


def user_mistake(text: str) -> str:
    """A mistake on the command line or in the configuration, as argparse says it."""
    return f"ft_launcher: error: {' '.join(text.split())}"


def cycle_started(*, cycle: int, world_size: int, local_ranks: Sequence[int], nodes: int) -> str:
    """``local_ranks`` are this node's global ranks."""
    head = f"cycle {cycle} started: {_count(world_size, 'rank')} on {_count(nodes, 'node')}"
    if nodes == 1:
        return head
    first, last = local_ranks[0], local_ranks[-1]
    here = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{head}, {here} here"


def cycle_ended(*, cycle: int, cause: Cause, decision: Decision, outcome: Outcome, max_restarts: int) -> str:
    """The end of a cycle that did not succeed, and what follows."""
    head = f"cycle {cycle} ended: {cause.line}"
    if decision.reason or decision.action is Action.GIVE_UP:
        return f"{head}; {decision.reason}" if decision.reason else head
    follows = f"{head}; restarting as cycle {cycle + 1}"
    if outcome is Outcome.MEMBERSHIP:
        return f"{follows}, no restart used"
    return f"{follows}, {decision.restarts_left} of {_count(max_restarts, 'restart')} left"


def stuck(stats: Sequence[ProcessStat]) -> str:
    """Processes that SIGKILL doesn't end, or isn't allowed to, and their states: D is a wait in the kernel."""
    owner = {True: ", of another user", False: ""}
    told = ", ".join(f"{stat.pid} ({stat.comm}, state {stat.state}{owner[stat.is_anothers]})" for stat in stats)
    return f"process {told}" if len(stats) == 1 else f"processes {told}"


def did_not_end(stats: Sequence[ProcessStat], *, waited_s: float) -> str:
    """They hold what new ranks would need."""
    return f"{stuck(stats)} still running {waited_s:g} s after SIGKILL: leaving it behind"


def training_again(*, cycle: int, seconds: Mapping[str, float]) -> str:
    """The ranks of a new cycle are through their first step. ``seconds``: since the failure was noticed, by phase."""
    parts = ", ".join(f"{name} {duration:.2f}" for name, duration in seconds.items())
    return f"cycle {cycle} is training again {sum(seconds.values()):.2f} s after the failure was detected ({parts})"


def run_finished(cycles: int) -> str:
    """The good end."""
    return f"all ranks finished after {_count(cycles, 'cycle')}"


def unfit(ended: str, last_line: str, *, retry_s: float) -> str:
    """Why this node doesn't join. ``ended`` as in "ended with code 3", ``last_line`` is what the check said."""
    shown = last_line if len(last_line) <= _SHOWN else f"{last_line[: _SHOWN - 3]}..."
    said = f" ({shown})" if shown else ""
    return f"node health check failed: {ended}{said}; retrying in {retry_s:g} s"


def fit_again(failures: int) -> str:
    """It joins after all."""
    return f"node health check passed after {_count(failures, 'failure')}: joining"


def fresh_interpreters(reason: str) -> str:
    """Why ranks aren't forked; what each of them imports then costs its time at every restart."""
    return f"ranks start as fresh interpreters: {reason}"


def preload_left_out(module: str, reason: str) -> str:
    """A module that the user asked for, and that no rank can be forked with."""
    return f"--ft-preload: {module} is left out: {reason}"


def forked_at(where: str, what: str, took_s: float | None = None) -> str:
    """Where the script's ranks begin. ``what`` as in "reads RANK"."""
    point = "the end of the script" if not where and what == "ends" else f"{where or 'the script'} ({what})"
    after = "" if took_s is None else f", after {took_s:.1f} s of imports"
    return f"ranks are forked at {point}{after}"


def cannot_be_shared(reason: str, where: str, what: str) -> str:
    """Why no rank can be forked from a script that has got to ``where``."""
    return reason if not what else f"{reason} at {where or 'its end'}, where it {what}"


def file_changed(path: str) -> str:
    """The script has to run ahead again."""
    return f"{path} changed: running the script ahead again"


def fork_server_replaced(code: int) -> str:
    """The fork server is gone, ranks aren't hurt."""
    return f"the fork server ended ({exit_code(code)}); ranks are not affected; starting a new one"


def no_more_fork_servers(deaths: int) -> str:
    """Somebody keeps killing it."""
    return f"the fork server died {deaths} times; ranks start as fresh interpreters"


def shut_down_between(text: str) -> str:
    """The end of the job was asked for while no rank ran here."""
    return f"{text}; the job ends"


def nodes_waiting(count: int) -> str:
    """Why a healthy cycle ends: for the place of the cause."""
    return f"{_count(count, 'node')} waiting to join (new, or restarting its ranks)"


def asked_to_stop(*, name: str, ranks: int, timeout_s: float) -> str:
    """The first request to stop."""
    if not ranks:
        return f"received {name}"
    return (
        f"received {name}: forwarded to {_count(ranks, 'rank')}, waiting up to {timeout_s:g} s "
        f"(SIGINT or SIGTERM again after {AGAIN_AFTER_S:g} s kills them)"
    )


def forwarded(name: str, *, ranks: Sequence[int], unready: Sequence[int]) -> str:
    """A signal of ``--ft-forward-signals``; local ranks."""
    if not ranks and not unready:
        return f"{name} dropped: no rank runs now"
    kept = "" if not unready else f"local rank {', '.join(map(str, unready))} has no handler for it (yet)"
    if not ranks:
        return f"{name} not forwarded: {kept}"
    return f"{name} forwarded to {_count(len(ranks), 'rank')}" + (f", {kept}" if kept else "")


def killing_at_once(name: str) -> str:
    """The second request to stop."""
    return f"received {name} again: killing the ranks"


def stopped(name: str, failed: Sequence[str]) -> str:
    """Why a cycle ended that was asked to; ``failed`` says how ranks ended that didn't end with 0."""
    if not failed:
        return f"stopped by {name}, all ranks exited with 0"
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"stopped by {name}, {failed[0]}{more}"


def monitor_replaced(whose: str, reason: str, pause_s: float) -> str:
    """A monitor that didn't do its work any more."""
    when = "replacing it" if not pause_s else f"starting a new one in {pause_s:g} s, not monitored until then"
    return f"the monitor of {whose} {reason}; {when}"


def run_dir_removed(path: str) -> str:
    """Somebody removed the directory of the sockets, or what is in it."""
    return f"socket directory {path} was deleted: recreated"


def run_dir_lost(reason: str) -> str:
    """It can't be made again."""
    return f"the socket directory can't be recreated ({reason}): ranks that aren't connected yet will fail"


def observed(verdict: HangVerdict) -> str:
    """A rank that hangs under ``--ft-observe-only``."""
    where = "" if verdict.iteration is None else f" {when(verdict.iteration)}"
    return f"rank {verdict.rank} {describe_overdue(verdict)}{where}: not killed (observe-only)"


def finished_late(verdict: HangVerdict) -> str:
    """A rank that doesn't exit when all the others of the node have finished."""
    return (
        f"rank {verdict.rank} {describe_overdue(verdict)}: terminating it; "
        "the other ranks of this node have finished: treating it as finished"
    )


def paused(pid: int) -> str:
    """The judgement of hangs was suspended."""
    return f"paused by process {pid}: hang detection is off on this node until `megatron-ft resume`"


def resumed(pid: int, pause_s: float) -> str:
    """The judgement of hangs goes on."""
    return f"resumed by process {pid} after {pause_s:.1f} s, not counted against any timeout"


def taken_for_lost(why: str) -> tuple[str, str]:
    """The others gave this node up: for the place of the cause, and what follows."""
    told = f" ({why})" if why else ""
    return f"the other nodes declared this one lost{told} and continue without it", "on standby"


def job_went_on(text: str) -> str:
    """The job has ended, and this launcher's ranks had no part in its end."""
    return f"the job ended without this node: {text or 'others ran it to its end'}"


def in_one_line(error: BaseException) -> str:
    """An error that nobody foresaw."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def rendezvous_failed(error: BaseException) -> str:
    """The nodes can't meet (any more)."""
    causes = []
    current: BaseException | None = error
    while current is not None:
        causes.append(" ".join(str(current).split()) or type(current).__name__)
        current = current.__cause__
    return f"the rendezvous failed: {causes[0].removesuffix(' See inner exception for details.')}" + (
        f" ({causes[-1].partition(' Exception raised from')[0]})" if len(causes) > 1 else ""
    )


def exit_code(code: int) -> str:
    """How a process of ours ended, as subprocess has it."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
