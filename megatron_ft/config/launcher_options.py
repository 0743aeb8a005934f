"""Options of ``ft_launcher`` beyond torchrun's and those of the configuration, which ranks get, too."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.config.kinds import (
    COMMAND,
    DURATION,
    DURATION_OR_ZERO,
    FLAG,
    SIGNALS,
    TIMEOUT,
    YES_OR_NO,
    OptionKind,
    one_of,
    path,
    whole,
)
from megatron_ft.config.option import option, table_of
from megatron_ft.errors import Refused, nearest

ANY_FAILED, MIN_HEALTHY = RESTART_POLICIES = ("any-failed", "min-healthy")
REPORT, END, OFF = "report", "end", "off"
SCHEDULERS = ("slurm", "kubernetes")
"""Each is a file of `launcher/schedulers`, in the order in which "auto" looks for them."""
_LAST_PORT = 65535
RESTART_GRACE_S = 0.1
"""Time from SIGTERM to SIGKILL where a rank has failed: nothing can be saved together any more."""


class CollectivesWatch(NamedTuple):
    """Value of ``--ft-watch-collectives``."""

    how: str
    timeout_s: float | None = None
    """Seconds without a collective; None: half of the timeout of the ranks' process group."""

    def __str__(self) -> str:
        return self.how if self.timeout_s is None else f"{self.how}:{self.timeout_s:g}"


def _watch(value: object) -> CollectivesWatch:
    if isinstance(value, bool) and not value:  # YAML 1.1 reads the word off so
        return CollectivesWatch(OFF)
    if not isinstance(value, str):
        raise Refused
    how, colon, seconds = value.partition(":")
    if how not in (REPORT, END, OFF) or (colon and how == OFF):
        raise Refused(nearest(how, (REPORT, END, OFF)))
    return CollectivesWatch(how, DURATION.check(DURATION.read(seconds)) if colon else None)


_WATCH = OptionKind(
    check=_watch,
    allowed="report, end, report:SECONDS, end:SECONDS or off",
    plain=str,
    metavar="report|end[:SECONDS]|off",
)


def _port(value: object) -> str:
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not (port.isascii() and port.isdecimal()) or int(port) > _LAST_PORT:
        raise Refused
    return f"{host}:{int(port)}" if host else str(int(port))


METRICS_PORT = OptionKind(
    check=_port, allowed=f"a port from 0 to {_LAST_PORT}, or HOST:PORT, as in 127.0.0.1:9466", metavar="[HOST:]PORT"
)


def _modules(value: object) -> tuple[str, ...] | None:
    """Return the names in ``--ft-preload a,b``; None for "none": no fork server at all."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) and value.strip() else []
    if [name.lower() for name in names] == ["none"]:
        return None
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise Refused
    return tuple(dict.fromkeys(names))


_MODULES = OptionKind(
    check=_modules,
    allowed="names of modules, as in a,b.c, or none",
    plain=lambda stored: "none" if stored is None else ",".join(stored),
    metavar="MODULES",
)


@dataclass(kw_only=True, eq=False)
class LauncherOptions:
    """Options of the launcher alone. Durations are seconds; None means no limit, or not set."""

    cfg_path: str | None = option(
        None,
        path("of a file", "FILE"),
        "YAML file with a fault_tolerance section, at the top or nested in any other section.",
        names=("ft-cfg-path", "fault-tol-cfg-path"),
        in_yaml=False,
        is_printed=False,
    )
    ignore_missing_cfg: bool = option(
        False,
        FLAG,
        "Continue with the defaults if that file or its fault_tolerance section is missing.",
        names=("ft-ignore-missing-cfg", "ignore-missing-fault-tol-cfg"),
        in_yaml=False,
        is_printed=False,
    )
    dry_run: bool = option(
        False,
        FLAG,
        "Print each flag's meaning here, the effective configuration and environment, and exit. The exit code is 0, or "
        "2 with the mistakes. Starts no process, opens no port, writes no file.",
        in_yaml=False,
        is_printed=False,
    )
    log_dir: str | None = option(
        None,
        path("of a directory", "DIR"),
        "Directory of the event logs. Default: megatron_ft inside torchrun's --log-dir if that is given, else a "
        "directory under ~/.local/state/megatron_ft ($XDG_STATE_HOME): under Slurm slurm-JOBID.STEP, else a new one.",
        is_printed=False,  # printed on a line of its own
    )
    scheduler: str = option(
        "auto",
        one_of("auto", *SCHEDULERS, "none"),
        f"Scheduler whose variables fill in options that aren't given: {', '.join(SCHEDULERS)}, none, or auto. auto: "
        "the one that is found. The options are --nnodes, --rdzv-endpoint, --rdzv-id and the log directory.",
        names=("scheduler", "ft-scheduler"),
    )
    restart_policy: str = option(
        ANY_FAILED,
        one_of(*RESTART_POLICIES),
        "When to restart the ranks: any-failed or min-healthy. any-failed: when any rank fails or a node is lost. "
        "min-healthy: when fewer than MIN nodes are healthy or finished.",
        names=("restart-policy", "ft-restart-policy"),
    )
    term_timeout: float = option(
        1800.0,
        DURATION_OR_ZERO,
        "Time from SIGTERM or SIGINT for the launcher to SIGKILL for the ranks. The ranks get the signal, too. If not "
        "given, torchrun's --shutdown-timeout or TORCH_ELASTIC_SHUTDOWN_TIMEOUT, where one of these is set.",
        names=("term-timeout",),
    )
    workers_stop_timeout: float = option(
        5.0,
        DURATION_OR_ZERO,
        "Time from SIGTERM to SIGKILL for the ranks when the launcher restarts them. If not given, "
        f"{RESTART_GRACE_S:g} s where one of them has failed, because the ranks can't save a checkpoint together any "
        "more.",
        names=("workers-stop-timeout",),
    )
    scale_up_at_once: bool = option(
        False,
        FLAG,
        "Restart all ranks as soon as a node waits to join, as torchrun does. If not given, the node is on standby "
        "until the next restart.",
    )
    node_health_command: str | None = option(
        None,
        COMMAND,
        "Shell command to run before this node joins a round. While it exits with a code other than 0, the node "
        "does not join, and the command is retried. 'megatron-ft node-health gpu,disk,net,storage' is such a command.",
    )
    node_health_timeout: float | None = option(
        60.0, TIMEOUT, "A health command that takes longer is killed and counts as failed; null: no limit."
    )
    node_health_check_interval: float | None = option(
        None,
        TIMEOUT,
        "Run the health checks also while ranks run, this often; null: don't. A check that fails is "
        "reported, and the ranks run on: the node doesn't join the next round while it fails.",
        names=("ft-node-health-check-interval", "ft-param-node-health-check-interval"),
    )
    enable_dist_storage_healthcheck: bool = option(
        False,
        YES_OR_NO,
        "Check before each round that mounted network file systems answer: Lustre, NFS and others.",
    )
    segment_health_check_dir: str | None = option(
        None,
        path("of a directory", "DIR"),
        "A file here can keep a Slurm array task's nodes out of rounds. The file is called "
        "segment_health_check.JOB.TASK, by the array's job and task, or twice by the number of a job that is no array, "
        "and isn't empty. Its first line is printed as the reason. Remove the file, and the nodes join again.",
    )
    node_lost_timeout: float = option(
        15.0,
        DURATION,
        "Silence of its launcher after which a node is lost, where progress isn't known. That is before the first "
        "iteration of a cycle, with --restart-policy min-healthy, and if ranks neither report iterations nor use "
        "collectives. While all other nodes make progress, a silent node isn't lost for up to 10 minutes.",
    )
    max_no_progress_cycles: int = option(
        3,
        whole(0, 10**6 - 1, "cycles"),
        "End the job after this many failed cycles in a row that made no progress. A cycle made none if it neither "
        "began a new iteration nor resumed from a later one; only in jobs whose ranks report iterations. Also end the "
        "job after 2 starts in a row that failed in the same way (the same exception, or exit code) before the first "
        "step of a job that has never trained; failures that may come from outside don't count. 0: never.",
        names=("ft-max-no-progress-cycles", "ft-max-no-progress-restarts"),
    )
    checkpoint_iteration_file: str | None = option(
        None,
        path("of a file", "FILE"),
        "File that holds the iteration of the last checkpoint, as Megatron-LM's latest_checkpointed_iteration.txt "
        "does. That is the progress of a job whose ranks report no iterations.",
    )
    memory_checkpoint_dir: str | None = option(
        None,
        path("of a directory", "DIR"),
        "Directory, shared by all nodes, for the last memory checkpoint of a job. It is written if the job is stopped "
        "or ends with 94, and the next start with this directory goes on from there. Not given: nothing is written.",
    )
    memory_checkpoint_write_timeout: float = option(
        25.0,
        DURATION,
        "Longest time for writing that memory checkpoint. It counts from the signal that stops the job, or from the "
        "job's end. Slurm and Kubernetes kill 30 s after the signal unless told otherwise.",
    )
    memory_checkpoint_bandwidth: int = option(
        1000,
        whole(1, 10**6, "MB/s"),
        "Most that a node sends to the one that keeps copies of its memory checkpoints. Copies are only kept if "
        "FT_SECRET is set.",
    )
    segment: int = option(
        0,
        whole(0, 10**6 - 1, "nodes"),
        "Number of nodes in a group that shares an NVLink domain; 0: no groups. Nodes train in whole groups, with "
        "consecutive GROUP_RANKs; a spare replaces a node of its own domain. The domain is nvidia-smi's ClusterUUID, "
        "or FT_NVLINK_DOMAIN. MIN must be a multiple of this number.",
    )
    per_cycle_applog_prefix: str | None = option(
        None,
        path("of a file, beginning with /", "FILE"),
        "File for all output of the ranks of a cycle, instead of the launcher's output. FILE gets _cycleN before its "
        "extension, and each line begins with its rank. All nodes append to it.",
    )
    startup_timeout: float | None = option(
        None,
        TIMEOUT,
        "Longest time from the start of a rank's process to its init_workload_monitoring(). A rank that takes longer "
        "is terminated as hung.",
    )
    exit_timeout: float | None = option(
        None,
        TIMEOUT,
        "Longest time from a rank's shutdown_workload_monitoring() to the end of its process. A rank that takes longer "
        "is terminated as hung. If other ranks of the node have exited with 0, none has failed and none is still at "
        "work, that rank is terminated and treated as finished.",
    )
    watch_collectives: CollectivesWatch = option(
        CollectivesWatch(REPORT),
        _WATCH,
        "Watch ranks without a timeout by the collectives that torch counts. These are ranks without hooks, or with "
        "nothing configured and learned. report: print a line when no collective has begun or completed on any rank "
        "for SECONDS: which rank keeps the others waiting, and where. end: also terminate the ranks and restart, if a "
        "rank waits in a collective. off: don't watch. SECONDS: half of the timeout of the ranks' process group, which "
        "would end them (NCCL: 300 s, gloo: 900 s), unless given, as in end:120.",
    )
    observe_only: bool = option(False, FLAG, "Report which rank would have been terminated as hung; terminate none.")
    forward_signals: tuple[signal.Signals, ...] = option(
        (), SIGNALS, "Signals that are forwarded to the ranks without stopping the job, for example SIGUSR1,SIGUSR2."
    )
    metrics_port: str | None = option(
        None,
        METRICS_PORT,
        "Port for metrics of this launcher, scraped by Prometheus. On all addresses unless HOST names one; 0: any free "
        "port. The node at place 0 serves those of the job, each node its own. Needs prometheus_client.",
    )
    metrics_textfile: str | None = option(
        None,
        path("of a file", "FILE"),
        "File for the same metrics, replaced as a whole every 15 seconds. The textfile collector of node_exporter "
        "reads names that end in .prom. Needs prometheus_client.",
    )
    on_event: str | None = option(
        None,
        COMMAND,
        "Shell command to run when a cycle or the job ends, and for lost nodes. It gets a JSON object on standard "
        "input. One launcher of the job runs it, in the background, for 30 seconds at most.",
        is_printed=False,  # a webhook's address is a secret
    )
    preload: tuple[str, ...] | None = option(
        (),
        _MODULES,
        "Modules, as in a,b.c, that ranks share beside those that the script imports first. none: nothing is shared, "
        "each rank starts its own Python.",
        in_yaml=False,  # needed before a file can be read
    )
    reference_names: str = option(
        "on",
        one_of("on", "off"),
        "Modules that ranks get for nvidia_resiliency_ext.fault_tolerance and .ptl_resiliency. on: megatron_ft's, "
        "whether nvidia-resiliency-ext is installed or not. off: what is installed.",
        in_yaml=False,  # needed before a file can be read
    )


LAUNCHER_OPTIONS = table_of(LauncherOptions, "ft-")
