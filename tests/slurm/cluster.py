"""A real Slurm on this machine: a controller and some nodes, each a host of its own. Needs root.

A node has its own network, host name, process numbers, /tmp and /dev/shm; the rest of the file system is shared. That
is what a job sees on a cluster. Nothing is reachable from outside of these namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_ft.link.linux.processes import all_processes
from tests.support.launching import command_line
from tests.support.netns import Hosts

PACKAGES = "slurm-wlm munge iproute2 util-linux"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "ip", "nsenter", "unshare")
_FREEZER = Path("/sys/fs/cgroup/freezer")
_KNOW_HOSTS = 'mount --bind "$1/hosts" /etc/hosts; shift; exec "$@"'
_BECOME_NODE = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/tmp.$2" /tmp
mount -t tmpfs none /dev/shm
slurmd -N "$2" -f "$1/slurm.conf"
while :; do sleep 1000 & wait; done
"""
_CONFIGURATION = """\
ClusterName=ft
SlurmctldHost={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
MinJobAge=3600
SlurmdTimeout=10
SlurmctldTimeout=20
InactiveLimit=0
Waittime=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
KILL_WAIT_S = 10
GRACE_S = 15


class Cluster:
    """``node1`` to ``nodeN``, and a controller. Partitions: ``main``, ``graceless``, and ``high``, which preempts."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.count = root, count
        self._hosts = Hosts(root, count + 1)
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    # -- nodes ------------------------------------------------------------------------------------------------

    def boot(self, number: int) -> None:
        """Start the node, which isn't there, and connect it."""
        self._hosts.heal(number)
        name = f"node{number}"
        for folder in (f"tmp.{name}", f"spool.{name}"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir()
        (self.root / f"tmp.{name}").chmod(0o1777)
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += ["sh", "-c", _BECOME_NODE, "sh", str(self.root), name]
        self._nodes[number] = self._start(number, words)

    def power_off(self, number: int) -> None:
        """Nothing comes from it any more: no packet, no end of a connection."""
        self._hosts.cut(number)
        node = self._nodes.pop(number)
        node.kill()
        node.wait()

    def boot_what_is_off(self) -> None:
        """And wait until Slurm has all nodes."""
        for number in range(1, self.count + 1):
            if number not in self._nodes:
                # what Slurm finds out by itself, in a minute or two
                self.command("scontrol", "update", f"NodeName=node{number}", "State=DOWN", "Reason=off")
                self.boot(number)
                self.command("scontrol", "update", f"NodeName=node{number}", "State=RESUME", check=False)
        wait_for(lambda: self._idle() == self.count, 60, "all nodes are idle")

    def kill(self, number: int, pattern: str) -> None:
        """SIGKILL for processes of that node whose command line matches."""
        namespace = os.readlink(f"/proc/{self._hosts.inhabitant(number)}/ns/net")
        for stat in all_processes():
            with contextlib.suppress(OSError):
                is_there = os.readlink(f"/proc/{stat.pid}/ns/net") == namespace
                if is_there and re.search(pattern, " ".join(command_line(stat.pid))):
                    os.kill(stat.pid, signal.SIGKILL)

    # -- Slurm ------------------------------------------------------------------------------------------------

    def command(self, *words: str, cwd: Path | None = None, check: bool = True, bound_s: float = 60) -> str:
        """What it prints, run on the controller.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(
            [*self._enter(self.count + 1), *words],
            env=self._environment(),
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=bound_s,
        )
        if done.returncode and check:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        told = self.command("scontrol", "--oneliner", "show", "job", number).splitlines()
        return dict(word.partition("=")[::2] for word in told[0].split() if "=" in word)

    # -- up and down ------------------------------------------------------------------------------------------

    def _up(self) -> None:
        tracking = "cgroup" if _FREEZER.is_dir() else "linuxproc"
        nodes = f"node[1-{self.count}]"
        partition = f"Nodes={nodes} MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier="
        text = _CONFIGURATION.format(
            root=self.root, control=f"node{self.count + 1}", tracking=tracking, kill_wait=KILL_WAIT_S
        )
        text += f"NodeName={nodes} CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
        text += f"PartitionName=main {partition}10 Default=YES PreemptMode=REQUEUE GraceTime={GRACE_S}\n"
        text += f"PartitionName=graceless {partition}10 PreemptMode=REQUEUE GraceTime=0\n"
        text += f"PartitionName=high {partition}100 PreemptMode=OFF\n"
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._hosts.up()
        files = [f"--{name}={self.root / f'munge.{end}'}" for name, end in _MUNGE_FILES]
        self._daemons.append(self._start(self.count + 1, ["munged", "--foreground", "--force", *files]))
        wait_for((self.root / "munge.sock").exists, 10, "munged is there")
        control = ["slurmctld", "-D", "-c", "-f", str(self.root / "slurm.conf")]
        self._daemons.append(self._start(self.count + 1, control))
        for number in range(1, self.count + 1):
            self.boot(number)
        wait_for(lambda: self._idle() == self.count, 30, f"all nodes are idle, see {self.root}/*.log")

    def _down(self) -> None:
        for process in [*self._nodes.values(), *reversed(self._daemons)]:
            process.kill()
            process.wait()
        self._hosts.down()
        for number in range(1, self.count + 1):
            _remove_groups(_FREEZER / f"slurm_node{number}")

    def _idle(self) -> int:
        return self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).split().count("idle")

    def _start(self, number: int, words: Iterable[str]) -> subprocess.Popen[bytes]:
        with (self.root / f"host.{number}.out").open("ab") as out:
            return subprocess.Popen(
                [*self._enter(number), *words],
                env=self._environment(),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _enter(self, number: int) -> list[str]:
        """``ip netns exec`` would mount another /sys, without its control groups."""
        inside = ["nsenter", "--target", str(self._hosts.inhabitant(number)), "--net", "--uts"]
        named = ["unshare", "--mount", "sh", "-c", _KNOW_HOSTS, "sh", str(self.root)]
        return inside if number <= self.count else [*inside, *named]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PET_"))}
        return {**kept, "SLURM_CONF": str(self.root / "slurm.conf"), "HOME": str(self.root)}


_MUNGE_FILES = (
    ("key-file", "key"),
    ("socket", "sock"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


def missing() -> list[str]:
    """Programs that are needed and aren't installed."""
    return [program for program in _PROGRAMS if shutil.which(program) is None]


def wait_for(condition: Callable[[], object], bound_s: float, what: str) -> None:
    """Look again and again.

    Raises:
        TimeoutError: it isn't so in time.
    """
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {bound_s:.0f} s it isn't so that {what}")
        time.sleep(0.1)


def _remove_groups(top: Path) -> None:
    """Control groups are removed one by one, the inner ones first."""
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
