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
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_ft.config.kinds import DURATION, YES_OR_NO, OptionKind, one_of
from megatron_ft.config.launcher_options import MIN_HEALTHY
from megatron_ft.config.torchrun import C10D_PORT, DEFAULT_PORT, ETCD_BACKENDS, ETCD_PORT, JOIN_TIMEOUT_S
from megatron_ft.errors import ConfigError
from megatron_ft.job.endpoint import HERE, is_loopback, routes
from megatron_ft.job.rules.messages import EtcdSettings, Identity
from megatron_ft.job.rules.restart_policy import Rules
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.schedulers import slurm
from megatron_ft.launcher.schedulers.schedulers import rank as find_rank
from megatron_ft.link.base.wording import listed
from megatron_ft.link.tcp import format_address

_SETTINGS = ("join_timeout", "timeout", "last_call_timeout", "is_host", "store_type")
_ETCD_SETTINGS = ("protocol", "cacert", "cert", "key", "user", "password")
_UUID = re.compile(r"ClusterUUID\s*:\s*([0-9A-Fa-f-]+)")


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Place and way of this launcher to meet the others of its job."""

    me: Identity
    """Identity of this launcher; the facts of earlier lives follow."""
    is_alone: bool
    """The job has one node: it is never coordinated with another launcher, whatever endpoint it names."""
    here: str
    """Name or address by which ranks of other nodes reach this machine."""
    ranks_port: int = 0
    """Port at which the ranks of a job of one node meet, if the user named one; 0: any free one will do."""
    etcd: EtcdSettings | None = None
    """The lock of the job is in etcd; None: it is the endpoint's port."""
    note: str = ""
    """A line to say at the start; empty if there is nothing to say."""

    @property
    def is_first(self) -> bool:
        """Whether this launcher says, before the nodes meet, what all launchers of the job would say alike."""
        return self.is_alone or self.me.rank == 0 or self.me.is_here


def check(line: CommandLine) -> tuple[Rules, str, int, EtcdSettings | None, bool | None]:
    """Return the job's rules, the endpoint's host and port, etcd's settings if the lock is there, and ``is_host``.

    Raises:
        ConfigError: a mistake of the user.
    """
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
    etcd, is_host = None, _setting(line, "is_host", YES_OR_NO)
    if namespace.rdzv_backend in ETCD_BACKENDS:
        if not namespace.rdzv_endpoint:
            raise ConfigError(
                f"--rdzv-backend {namespace.rdzv_backend}: say where etcd is: --rdzv-endpoint HOST:{ETCD_PORT}"
            )
        given = {name: value for name in _ETCD_SETTINGS if (value := line.rendezvous_settings.get(name))}
        by_default = "https" if given.keys() & {"cacert", "cert", "key"} else "http"
        given["protocol"] = _setting(line, "protocol", one_of("http", "https")) or by_default
        etcd = EtcdSettings(host, port, **given)
    return _rules(line), host, port, etcd, None if etcd else is_host


def meeting_place(line: CommandLine, environ: Mapping[str, str]) -> MeetingPlace:
    """Return the meeting place. Name lookups may take as long as the name server does.

    Raises:
        ConfigError: a mistake of the user.
    """
    rules, host, port, etcd, is_host = check(line)
    used = {"", *_SETTINGS, *(_ETCD_SETTINGS if etcd else ())}
    unused = [each for each in line.rendezvous_settings if each not in used]
    note = f"--rdzv-conf: these have no effect here: {', '.join(unused)}" if unused else ""
    if line.namespace.rdzv_backend == "etcd-v2":
        note = "--rdzv-backend etcd-v2: v3 of etcd's interface is used, as with etcd"
    # directories may differ between the nodes of a job; what they run, and for whom, doesn't
    script, start = os.path.basename(str(line.namespace.training_script)), line.where.life
    local_addr, name = line.namespace.local_addr, socket.gethostname()
    me = Identity(
        job="/".join([line.run_id, str(os.getuid()), start or environ.get("SLURM_JOB_ID", ""), script]),
        rules=rules,
        instance=uuid.uuid4().hex,
        name=name,
        endpoint="this process",
        started_s=line.began_s,
        is_named=False,
    )
    if rules.max_nodes == 1:
        is_named = port and line.namespace.rdzv_backend == "static" and not line.namespace.standalone
        here, ranks_port = (host, port) if is_named else (local_addr or HERE, 0)
        return MeetingPlace(me=me, is_alone=True, here=here, ranks_port=ranks_port, note=note)
    own, found = slurm.own_names(environ, name), routes(host)
    is_here = bool(is_host)
    if is_host is None and etcd is None:
        is_here = is_loopback(host) or host in own or host == socket.getfqdn() or _is_here(host, port, found)
    here = _own_address(local_addr, host, own, found)
    me = replace(
        me,
        host=f"[{here}]" if ":" in here else here,
        endpoint=format_address(host, port),
        rank=find_rank(environ, given=line.node_rank, min_nodes=line.min_nodes, max_nodes=line.max_nodes),
        names_life=bool(line.where.run_id),
        is_named=line.is_named or bool(line.where.run_id),
        is_here=is_here,
        has_known_host=bool(etcd or is_here or slurm.hosts(environ, 1) or line.where.endpoint),
        domain=nvlink_domain(environ) if rules.segment else "",
        is_in_etcd=etcd is not None,
    )
    return MeetingPlace(me=me, is_alone=False, here=here, etcd=etcd, note=note)


def _is_here(host: str, port: int, found: Mapping[str, str]) -> bool:
    """Return True if the endpoint's name is this machine's, by its addresses and this machine's routes to them.

    Raises:
        ConfigError: it is a name of several machines, each of which would begin a job: another host answers at one of
            its addresses, too, or it stands for loopback addresses only.
    """
    others = [address for address, source in found.items() if address != source]
    problem = ""
    if found and all(map(is_loopback, found)):
        shown = listed(sorted(found))
        problem = f"{shown} on this machine, which no other node reaches: name the host as the other nodes do"
    elif len(others) < len(found) and (
        alive := sorted(each for each in others if slurm.host_answers(each, port, timeout_s=1.0))
    ):
        problem = f"the name of this host and of others ({listed(alive)}): name one host"
    if problem:
        raise ConfigError(
            f"--rdzv-endpoint: {host} is {problem}, or set --rdzv-conf is_host=true for one launcher and "
            "is_host=false for the others"
        )
    return len(others) < len(found)


def _own_address(local_addr: str | None, endpoint: str, own: Set[str], found: Mapping[str, str]) -> str:
    """Return the name or address by which ranks of other nodes reach this machine.

    If the user names none, it is the address from which this machine reaches the endpoint: others needn't look it up.
    Where that tells nothing, it is this host's own name, as torchrun has it.

    Raises:
        ConfigError: ``--local-addr`` is another machine's. One that isn't known here may be known to other nodes.
    """
    if local_addr:
        theirs = {} if is_loopback(local_addr) or local_addr in own else routes(local_addr)
        if theirs and all(address != source for address, source in theirs.items()):
            raise ConfigError(
                f"--local-addr: {local_addr} isn't an address of this machine; name one by which other nodes reach it"
            )
        return local_addr
    if is_loopback(endpoint):
        return HERE
    source = next(iter(found.values()), "")
    # %: an address that only means something together with an interface of this machine
    return socket.getfqdn() if not source or is_loopback(source) or "%" in source else source


def _rules(line: CommandLine) -> Rules:
    options, is_alone = line.options, line.max_nodes <= 1 or line.namespace.standalone
    if is_alone and line.min_nodes > 1:
        raise ConfigError(f"--standalone is for one node, and --nnodes asks for {line.min_nodes}")
    if options.segment and line.min_nodes % options.segment:
        raise ConfigError(
            f"--ft-segment: {line.min_nodes} nodes (MIN of --nnodes) can't be divided into groups of {options.segment}"
        )
    # timeout: the static rendezvous' word for it
    join_s = _setting(line, "join_timeout", DURATION) or _setting(line, "timeout", DURATION) or JOIN_TIMEOUT_S
    return Rules(
        min_nodes=1 if is_alone else line.min_nodes,
        max_nodes=1 if is_alone else line.max_nodes,
        min_healthy=options.restart_policy == MIN_HEALTHY,
        max_restarts=line.namespace.max_restarts,
        max_stalled=options.max_no_progress_cycles,
        at_once=options.scale_up_at_once,
        last_call_s=_setting(line, "last_call_timeout", DURATION),
        launchers=0 if is_alone else line.where.launchers,
        segment=0 if is_alone else options.segment,
        join_timeout_s=join_s,
        node_lost_s=options.node_lost_timeout,
    )


def _setting(line: CommandLine, name: str, kind: OptionKind) -> Any:
    """Return the value of a setting of --rdzv-conf; None if it isn't given."""
    text = line.rendezvous_settings.get(name)
    return kind.judge("--rdzv-conf:", kind.read(text), f"{name}={text}") if text else None


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
