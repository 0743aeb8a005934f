"""Where the nodes of a job meet, by the command line and the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron_ft.errors import ConfigError
from megatron_ft.job.endpoint import routes
from megatron_ft.job.rules.messages import EtcdSettings, Rules
from megatron_ft.launcher.arguments import parse
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.coordination import meeting_place as meeting_places
from megatron_ft.launcher.coordination.meeting_place import MeetingPlace, meeting_place
from megatron_ft.launcher.schedulers import slurm
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment
from megatron_ft.link.base.hosts import expand_hosts

HERE = "node01"
C10D = "--rdzv-backend=c10d"
STATIC = "--rdzv-backend=static"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def command_line(*options: str, script: str = __file__, rest: tuple[str, ...] = ()) -> CommandLine:
    return parse([*options, script, *rest])


def place(*options: str, environ: Mapping[str, str] | None = None) -> MeetingPlace:
    return meet(command_line(*options), environ or {})


def meet(line: CommandLine, environ: Mapping[str, str]) -> MeetingPlace:
    """The meeting place, if this host is node01."""
    routes = lambda host: {"192.0.2.1" if host == HERE else "192.0.2.2": "192.0.2.1"}  # noqa: E731
    with mock.patch.object(meeting_places, "routes", routes):
        return meeting_place(line, environ)


def test_static_job_is_coordinated_at_its_master_in_the_order_of_node_ranks_and_needs_the_most_nodes() -> None:
    found = place("--nnodes=2:4", STATIC, "--master-addr=a", "--master-port=7", "--node-rank=2")
    assert (found.is_alone, found.me.endpoint, found.me.rank) == (False, "a:7", 2)
    assert (found.me.rules.min_nodes, found.me.rules.max_nodes) == (4, 4)
    rules = place("--nnodes=2:4", "--master-addr=a").me.rules
    assert (rules.min_nodes, rules.max_nodes) == (2, 4), "static only by default"


@pytest.mark.parametrize(
    ("options", "endpoint", "is_here"),
    [
        (["--rdzv-endpoint=a:1"], "a:1", False),
        (["--rdzv-endpoint=node01"], "node01:29500", True),
        ([C10D, "--rdzv-endpoint=node01"], "node01:29400", True),
        ([C10D], "localhost:29400", True),
        ([], "127.0.0.1:29500", True),
        ([C10D, "--master-addr=a", "--master-port=7"], "a:7", False),
        (["--rdzv-endpoint=[fe80::1]:7"], "[fe80::1]:7", False),
        (["--rdzv-endpoint=a", "--rdzv-conf=is_host=true"], "a:29500", True),
        (["--rdzv-endpoint=node01", "--rdzv-conf=is_host=0"], "node01:29500", False),
    ],
)
def test_endpoint_follows_from_the_options(options: list[str], endpoint: str, is_here: bool) -> None:
    found = place("--nnodes=2", *options)
    assert (found.me.endpoint, found.me.is_here) == (endpoint, is_here)


def test_endpoint_on_a_host_of_the_schedulers_job_is_known() -> None:
    environ = {"SLURM_JOB_NODELIST": "node[01-20]", "SLURMD_NODENAME": "node03"}
    assert place("--nnodes=20", "--rdzv-endpoint=node02", environ=environ).me.has_known_host
    assert not place("--nnodes=20", "--rdzv-endpoint=node02").me.has_known_host
    assert place("--nnodes=20", "--rdzv-endpoint=node03", environ=environ).me.is_here


def test_endpoint_name_that_is_only_a_loopback_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: found)
    line = command_line("--nnodes=2", "--rdzv-endpoint=master:1")
    with pytest.raises(ConfigError, match=r"master is 127\.0\.1\.1 on this machine, which no other node"):
        meeting_place(line, {})
    for words in (("--rdzv-endpoint=127.0.0.1:1",), ("--rdzv-endpoint=master:1", "--rdzv-conf=is_host=true")):
        assert meeting_place(command_line("--nnodes=2", *words), {}).me.is_here
    assert meeting_place(line, {"SLURMD_NODENAME": "master"}).me.is_here
    own = socket.gethostname()
    assert meeting_place(command_line("--nnodes=2", f"--rdzv-endpoint={own}:1"), {}).me.is_here


SRUN = {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("options", "environ", "rank"),
    [
        ([], {}, None),
        (["--node-rank=0"], {"GROUP_RANK": "5"}, 0),
        ([], {"GROUP_RANK": "5", **SRUN}, 5),
        ([], SRUN, 3),
        ([], {**SRUN, "SLURM_STEP_NUM_TASKS": "16"}, 1),
        # two nodes of a job of four, started apart from each other: both would have the same
        ([], {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, None),
        # four tasks on one node
        ([], {**SRUN, "SLURM_STEP_NUM_NODES": "1"}, 3),
        # a batch script, which starts all launchers itself
        ([], {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}, None),
        # with two spares
        ([], {**SRUN, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "6"}, 3),
        ([], {"JOB_COMPLETION_INDEX": "7"}, 7),
        ([], {"JOB_COMPLETION_INDEX": ""}, None),
    ],
)
def test_node_rank_comes_from_option_or_environment(
    options: list[str], environ: dict[str, str], rank: int | None
) -> None:
    found = place("--nnodes=4", "--rdzv-endpoint=a:1", *options, environ=environ)
    assert found.me.rank == rank


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("a[098-101]-ib,b", ["a098-ib", "a099-ib", "a100-ib", "a101-ib", "b"]),
        ("r[1-2]n[01,03]", ["r1n01", "r1n03", "r2n01", "r2n03"]),
        ("a[x-y],b[,c", ["c"]),
        ("a[1-2,,z],b", ["a1", "a2", "b"]),
        ("a[00001-99999999999]", [f"a{number:05}" for number in range(1, 9)]),
    ],
)
def test_host_lists_of_slurm_are_expanded(text: str, names: list[str]) -> None:
    assert list(expand_hosts(text, 8)) == names


def test_rules_of_the_job_follow_from_the_options() -> None:
    found = place(
        *("--nnodes=2:5", "--max-restarts=7", "--restart-policy=min-healthy", "--ft-scale-up-at-once"),
        *("--ft-max-no-progress-cycles=9", "--rdzv-endpoint=a"),
        "--rdzv-conf=last_call_timeout=3,join_timeout=60,keep_alive_interval=1",
    )
    assert found.me.rules == Rules(
        min_nodes=2,
        max_nodes=5,
        min_healthy=True,
        max_restarts=7,
        max_stalled=9,
        at_once=True,
        last_call_s=3.0,
        join_timeout_s=60.0,
    )
    assert found.note == "--rdzv-conf: these have no effect here: keep_alive_interval"
    assert place("--nnodes=2").me.rules == Rules(min_nodes=2, max_nodes=2, max_stalled=3)
    assert place("--nnodes=2", "--rdzv-conf=timeout=70").me.rules.join_timeout_s == 70.0
    for alone in ((), ("--standalone", "--nnodes=1:2")):
        rules = place(*alone).me.rules
        assert (rules.min_nodes, rules.max_nodes) == (1, 1)


def test_segments_need_a_domain_and_whole_groups_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="FT_NVLINK_DOMAIN"):
        place("--nnodes=4", "--ft-segment=2", "--rdzv-endpoint=a")
    found = place("--nnodes=4", "--ft-segment=2", "--rdzv-endpoint=a", environ={"FT_NVLINK_DOMAIN": "rack 7"})
    assert (found.me.rules.segment, found.me.domain) == (2, "rack 7")
    assert place("--nnodes=4", "--ft-segment=0", "--rdzv-endpoint=a").me.domain == ""
    assert place("--ft-segment=1").me.rules.segment == 0
    with pytest.raises(ConfigError, match=r"3 nodes .MIN of --nnodes. can't be divided into groups of 2"):
        place("--nnodes=3:8", "--ft-segment=2", "--rdzv-endpoint=a")


def test_a_single_nodes_ranks_meet_where_the_user_said() -> None:
    def where(*options: str) -> tuple[str, int]:
        found = place(*options)
        return found.here, found.ranks_port

    assert where() == where("--standalone", "--master-port=7") == where("--rdzv-endpoint=a:0") == ("127.0.0.1", 0)
    assert where("--local-addr=me") == ("me", 0)
    assert where("--master-port=7") == ("127.0.0.1", 7)
    assert where("--rdzv-endpoint=[::1]:7") == ("::1", 7)


def test_jobs_with_one_endpoint_are_told_apart() -> None:
    def job(*options: str, script: str = __file__, rest: tuple[str, ...] = ()) -> str:
        line = command_line("--nnodes=2", *options, script=script, rest=rest)
        return meet(line, {}).me.job

    other = Path(__file__).with_name("test_rendezvous.py")
    jobs = [job(), job("--rdzv-id=7"), job(script=str(other))]
    assert len(set(jobs)) == len(jobs)
    assert job("--node-rank=1") == job("--nproc-per-node=8") == jobs[0], "nodes may differ in these"
    assert job(rest=("a", "b")) == job(rest=("a b",)) == jobs[0], "nodes may differ in their arguments"
    assert job(script=os.path.relpath(other)) == jobs[2], "nodes may differ in their directories"
    assert str(os.getuid()) in jobs[0].split("/")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes=2", "--rdzv-endpoint=a,b:x"], ["--rdzv-endpoint", "b:x"]),
        (["--nnodes=2", "--rdzv-endpoint=a b"], ["--rdzv-endpoint", "a b"]),
        (["--nnodes=2", "--master-addr=a", "--master-port=70000"], ["--master-port", "a:70000"]),
        (["--nnodes=2", "--rdzv-endpoint=a,b"], ["--rdzv-endpoint", "a,b", "name one host"]),
        (["--nnodes=2", "--node-rank=-1"], ["--node-rank", "-1"]),
        (["--nnodes=2", "--standalone"], ["--standalone", "--nnodes", "2"]),
        (["--nnodes=2", "--rdzv-conf=is_host=maybe"], ["--rdzv-conf", "is_host=maybe"]),
        (["--nnodes=2", "--rdzv-conf=join_timeout=0"], ["--rdzv-conf", "join_timeout=0"]),
        (["--nnodes=2", "--rdzv-conf=last_call_timeout=nan"], ["--rdzv-conf", "last_call_timeout=nan"]),
        (["--nnodes=2", C10D, "--rdzv-conf=store_type=file"], ["--rdzv-conf", "store_type=file", "c10d", "endpoint"]),
    ],
)
def test_mistake_in_the_rendezvous_options_names_option_and_value(options: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line(*options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_of_this_machine_are_reached_from_themselves() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1"):
        assert routes(host) == {host: host}
    for host in ("192.0.2.1", "nobody.invalid", "x" * 70, "a..b"):
        assert all(address != source for address, source in routes(host).items()), host
    (source,) = routes("192.0.2.1").values()
    if not source:
        pytest.skip("no network here")
    assert routes(source) == {source: source}  # that of a network card


@pytest.mark.parametrize(
    ("found", "others"),
    [
        ({"192.0.2.1": "192.0.2.1", "192.0.2.9": "192.0.2.1"}, "192.0.2.9"),
        ({"192.0.2.9": "192.0.2.1", "192.0.2.8": "192.0.2.1"}, ""),  # none is this host's
        ({"192.0.2.1": "192.0.2.1", "192.0.2.66": "192.0.2.1"}, ""),  # no host is there
    ],
)
def test_endpoint_whose_name_is_also_that_of_other_hosts_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], others: str
) -> None:
    monkeypatch.setattr(meeting_places, "routes", lambda _host: found)
    monkeypatch.setattr(slurm, "host_answers", lambda address, _port, **_how: address != "192.0.2.66")
    line = command_line("--nnodes=2", "--rdzv-endpoint=service:1")
    if not others:
        assert meeting_place(line, {}).me.is_here is ("192.0.2.1" in found)
        return
    told = (
        rf"service is the name of this host and of others \({others}\): name one host, or set --rdzv-conf is_host=true"
    )
    with pytest.raises(ConfigError, match=told):
        meeting_place(line, {})


@pytest.mark.parametrize(
    ("options", "towards", "host"),
    [
        (["--local-addr=localhost"], "10.0.0.1", "localhost"),
        (["--rdzv-endpoint=localhost:1"], "10.0.0.1", "127.0.0.1"),
        ([], "10.0.0.1", "10.0.0.1"),
        ([], "fd00::1", "fd00::1"),
        ([], "127.0.1.1", "fqdn"),
        ([], "fe80::1%eth0", "fqdn"),
        ([], "", "fqdn"),
    ],
)
def test_own_address_is_one_by_which_others_can_reach_this_host(
    options: list[str], towards: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "fqdn")
    monkeypatch.setattr(meeting_places, "routes", lambda _host: {"10.0.0.2": towards})
    found = meeting_place(command_line("--nnodes=2", "--rdzv-endpoint=node01:1", *options), {})
    assert found.here == host
    assert found.me.host == (f"[{host}]" if ":" in host else host)


@pytest.mark.parametrize(("host", "is_refused"), [("192.0.2.7", True), ("127.0.0.2", False), ("nobody.invalid", False)])
def test_local_address_of_another_machine_is_refused(host: str, is_refused: bool) -> None:
    options = ("--nnodes=2", "--rdzv-endpoint=localhost", f"--local-addr={host}")
    if not is_refused:
        found = meeting_place(command_line(*options), {})
        assert found.me.is_here  # a name that isn't known here may be known to other nodes
        return
    with pytest.raises(ConfigError, match=r"--local-addr: 192\.0\.2\.7 isn't an address of this machine"):
        meeting_place(command_line(*options), {})


def test_a_job_is_one_life_where_a_scheduler_names_it() -> None:
    for where in (SchedulerEnvironment(life="7.0"), SchedulerEnvironment(life="train", run_id="train")):
        line = replace(command_line("--nnodes=2", C10D, "--rdzv-endpoint=a:1"), where=where)
        assert meet(line, {}).me.names_life is (where.life == "train")


ETCD = ("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=e")


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        ("", EtcdSettings("e", 2379)),
        ("protocol=https,cacert=ca.pem", EtcdSettings("e", 2379, "https", "ca.pem")),
        ("cert=c.pem,key=k.pem", EtcdSettings("e", 2379, "https", "", "c.pem", "k.pem")),
        ("user=u,password=p,timeout=9", EtcdSettings("e", 2379, user="u", password="p")),
    ],
)
def test_etcd_is_at_the_endpoint_and_its_settings_have_torchs_names(conf: str, settings: EtcdSettings) -> None:
    found = place(*ETCD, f"--rdzv-conf={conf}", environ={"SLURMD_NODENAME": "e"})
    assert (found.etcd, found.me.endpoint, found.me.is_here, found.note) == (settings, "e:2379", False, "")
    assert found.me.rules == place("--nnodes=2", C10D, f"--rdzv-conf={'timeout=9' * ('timeout' in conf)}").me.rules


def test_etcd_v2_is_served_by_v3_and_a_line_says_so() -> None:
    found = place("--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=e:4001")
    assert found.etcd == EtcdSettings("e", 4001)
    assert found.note == "--rdzv-backend etcd-v2: v3 of etcd's interface is used, as with etcd"
    assert "no effect here: cacert" in place("--nnodes=2", C10D, "--rdzv-conf=cacert=x").note
    assert place("--rdzv-backend=etcd", "--nnodes=1", "--rdzv-endpoint=e").etcd is None  # a job of one node needs none


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ETCD[:2], "--rdzv-backend etcd: say where etcd is: --rdzv-endpoint HOST:2379"),
        ([*ETCD, "--rdzv-conf=protocol=ftp"], "--rdzv-conf: protocol=ftp: must be http or https"),
    ],
)
def test_mistake_in_the_settings_of_etcd_says_what_is_missing(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(*options)
