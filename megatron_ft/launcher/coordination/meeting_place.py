"""Meeting place of the nodes of a job, and its rules: from the command line and the environment. Pure, but for names
that are looked up, and the driver that `nvlink_domain` asks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_ft.config.launcher_options import MIN_HEALTHY
from megatron_ft.config.torchrun import C10D_PORT, DEFAULT_PORT, ETCD_BACKENDS, ETCD_PORT, JOIN_TIMEOUT_S
from megatron_ft.errors import ConfigError
from megatron_ft.job.endpoint import check_name, is_this_machine
from megatron_ft.job.rules.messages import EtcdSettings, Identity
from megatron_ft.job.rules.restart_policy import Rules
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.schedulers import slurm
from megatron_ft.launcher.schedulers.schedulers import rank as find_rank
from megatron_ft.link.tcp import format_address

_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_NO_EFFECT = ("close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt", "read_timeout")
_ETCD_SETTINGS = ("protocol", "cacert", "cert", "key", "user", "password")
_UUID = re.compile(r"ClusterUUID\s*:\s*([0-9A-Fa-f-]+)")


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Place and way of this launcher to meet the others of its job."""

    me: Identity
    """Identity of this launcher; its addresses, and the facts of earlier lives, follow when it joins."""
    is_alone: bool
    """The job has one node: it is never coordinated with another launcher, whatever endpoint it names."""
    etcd: EtcdSettings | None = None
    """The lock of the job is in etcd; None: it is the endpoint's port."""
    ranks_store: str = ""
    """``host:port`` where the ranks of a job of one node meet, if the user named it; else any free port will do."""
    note: str = ""
    """A line to say at the start; empty if there is nothing to say."""

    @property
    def is_first(self) -> bool:
        """Whether this launcher says, before the nodes meet, what all launchers of the job would say alike."""
        return self.is_alone or self.me.rank == 0 or self.me.is_here


def check(line: CommandLine) -> None:
    """Find the user's mistakes, without looking up names.

    Raises:
        ConfigError: one was found.
    """
    _endpoint(line)
    _rules(line)
    _is_host(line.rendezvous_settings)
    _etcd(line)


def meeting_place(line: CommandLine, environ: Mapping[str, str]) -> MeetingPlace:
    """Return the meeting place. Name lookups may take as long as the name server does.

    Raises:
        ConfigError: a mistake of the user.
    """
    # directories may differ between the nodes of a job; what they run, and for whom, doesn't
    script, start = os.path.basename(str(line.namespace.training_script)), line.where.life
    host, port = _endpoint(line)
    me = Identity(
        job="/".join([line.run_id, str(os.getuid()), start or environ.get("SLURM_JOB_ID", ""), script]),
        rules=_rules(line),
        instance=uuid.uuid4().hex,
        name=socket.gethostname(),
        endpoint="",
        started_s=line.began_s,
        is_named=False,
    )
    if _is_alone(line):
        is_named = port and line.namespace.rdzv_backend == "static" and not line.namespace.standalone
        me = replace(me, endpoint="this process")
        return MeetingPlace(me=me, is_alone=True, ranks_store=format_address(host, port) if is_named else "")
    etcd = _etcd(line)
    is_host = None if etcd else _is_host(line.rendezvous_settings)
    is_here = is_host
    if is_host is None and etcd is None:
        own = slurm.own_names(environ, socket.gethostname())
        is_here = host in own or is_this_machine(host, unknown=host == socket.getfqdn())
        if is_here and host not in own:
            check_name(host, port)
    local_addr = line.namespace.local_addr
    if local_addr and not is_this_machine(local_addr, unknown=True):  # other nodes would look for these ranks in vain
        raise ConfigError(
            f"--local-addr: {local_addr} isn't an address of this machine; name one by which other nodes reach it"
        )
    me = replace(
        me,
        endpoint=format_address(host, port),
        rank=find_rank(environ, given=line.node_rank, min_nodes=line.min_nodes, max_nodes=line.max_nodes),
        names_life=bool(line.where.run_id),
        is_named=line.is_named or bool(line.where.run_id),
        is_here=bool(is_here),
        has_known_host=bool(etcd or is_here or slurm.hosts(environ, 1) or line.where.endpoint),
        domain=nvlink_domain(environ) if me.rules.segment else "",
        is_in_etcd=etcd is not None,
    )
    return MeetingPlace(me=me, is_alone=False, etcd=etcd, note=_without_effect(line))


def _is_alone(line: CommandLine) -> bool:
    return line.max_nodes <= 1 or line.namespace.standalone


def _endpoint(line: CommandLine) -> tuple[str, int]:
    """Return the endpoint's host and port."""
    namespace = line.namespace
    option, text = "--rdzv-endpoint", namespace.rdzv_endpoint
    if not text:
        option, text = "--master-addr, --master-port", f"{namespace.master_addr}:{namespace.master_port}"
    if "," in text:
        raise ConfigError(f"{option}: {text!r}: name one host; the launcher there starts the coordinator")
    ports = {"c10d": C10D_PORT, **dict.fromkeys(ETCD_BACKENDS, ETCD_PORT)}
    try:
        host, port = parse_rendezvous_endpoint(text, ports.get(namespace.rdzv_backend, DEFAULT_PORT))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    return host, port


def _etcd(line: CommandLine) -> EtcdSettings | None:
    """Return where etcd is, and how to be let in; None if the job doesn't use it."""
    settings, backend = line.rendezvous_settings, line.namespace.rdzv_backend
    if backend not in ETCD_BACKENDS:
        if named := [name for name in _ETCD_SETTINGS if name in settings]:
            raise ConfigError(f"--rdzv-conf: {', '.join(named)}: only with --rdzv-backend etcd, not {backend}")
        return None
    if not line.namespace.rdzv_endpoint:
        raise ConfigError(f"--rdzv-backend {backend}: say where etcd is: --rdzv-endpoint HOST:{ETCD_PORT}")
    given = {name: settings[name] for name in _ETCD_SETTINGS if settings.get(name)}
    protocol = given.setdefault("protocol", "https" if given.keys() & {"cacert", "cert", "key"} else "http")
    if protocol not in ("http", "https"):
        raise ConfigError(f"--rdzv-conf: protocol={protocol}: must be http or https")
    for name, needed in (("cert", "key"), ("key", "cert"), ("user", "password"), ("password", "user")):
        if name in given and needed not in given:
            raise ConfigError(f"--rdzv-conf: {name} needs {needed}")
    host, port = _endpoint(line)
    return EtcdSettings(host, port, **given)


def _is_host(settings: Mapping[str, str]) -> bool | None:
    value = settings.get("is_host", "").lower()
    if value and value not in (*_YES, *_NO):
        raise ConfigError(f"--rdzv-conf: is_host={value}: must be true or false")
    return value in _YES if value else None


def _rules(line: CommandLine) -> Rules:
    options, settings = line.options, line.rendezvous_settings
    is_alone = _is_alone(line)
    if is_alone and line.min_nodes > 1:
        raise ConfigError(f"--standalone is for one node, and --nnodes asks for {line.min_nodes}")
    if options.segment and line.min_nodes % options.segment:
        raise ConfigError(
            f"--ft-segment: {line.min_nodes} nodes (MIN of --nnodes) can't be divided into groups of {options.segment}"
        )
    # timeout: the static rendezvous' word for it
    join_s = _seconds(settings, "join_timeout") or _seconds(settings, "timeout") or JOIN_TIMEOUT_S
    return Rules(
        min_nodes=1 if is_alone else line.min_nodes,
        max_nodes=1 if is_alone else line.max_nodes,
        min_healthy=options.restart_policy == MIN_HEALTHY,
        max_restarts=line.namespace.max_restarts,
        max_stalled=options.max_no_progress_cycles,
        at_once=options.scale_up_at_once,
        last_call_s=_seconds(settings, "last_call_timeout"),
        launchers=0 if is_alone else line.where.launchers,
        segment=0 if is_alone else options.segment,
        join_timeout_s=join_s,
        node_lost_s=options.node_lost_timeout,
    )


def _seconds(settings: Mapping[str, str], name: str) -> float | None:
    text = settings.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:  # false for nan too
        raise ConfigError(f"--rdzv-conf: {name}={text}: must be a number of seconds greater than 0")
    return seconds


def _without_effect(line: CommandLine) -> str:
    if line.namespace.rdzv_backend == "etcd-v2":
        return "--rdzv-backend etcd-v2: v3 of etcd's interface is used, as with etcd"
    named = [name for name in _NO_EFFECT if name in line.rendezvous_settings]
    has = "has" if len(named) == 1 else "have"
    return f"--rdzv-conf: {', '.join(named)} {has} no effect: torch's rendezvous isn't used" if named else ""


def nvlink_domain(environ: Mapping[str, str]) -> str:
    """Which NVLink domain this node is in, for ``--ft-segment``: as FT_NVLINK_DOMAIN says, else nvidia-smi.

    Raises:
        ConfigError: neither the user nor the driver names one.
    """
    if named := environ.get("FT_NVLINK_DOMAIN", "").strip():
        return named
    told = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # there is no driver, or it doesn't answer
        told = subprocess.run(
            ["nvidia-smi", "-q"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60.0, check=False
        ).stdout
    found = {each for each in _UUID.findall(told) if each.strip("0-")}
    if len(found) == 1:
        return str(found.pop())
    what = "several ClusterUUIDs" if found else "no ClusterUUID"
    raise ConfigError(
        f"--ft-segment: nvidia-smi names {what} on this node; leave the option out, or name the node's NVLink "
        "domain in FT_NVLINK_DOMAIN"
    )
