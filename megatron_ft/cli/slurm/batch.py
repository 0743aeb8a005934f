"""The loop of `megatron-ft slurm`: srun, wait, read result.json, and follow the policy."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from megatron_ft.cli.slurm import commands
from megatron_ft.cli.slurm.policy import BatchAction, Next, Plan, decide
from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import TRY_AGAIN_CODE
from megatron_ft.job.rules import batch_script
from megatron_ft.job.rules.faults import advice
from megatron_ft.job.rules.lives import LIVES_FILE, Ending, Life, Lives
from megatron_ft.link.base.hosts import expand_hosts
from megatron_ft.link.base.signal_rules import Asked, SecondRequest
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.files.own_files import read_own

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OURS = ("FT_", "FAULT_TOL_", "NVRX_", "PET_")
"""Prefixes of variables that launchers read."""
_STOP = ("scancel", "--signal=TERM")
"""Sends each launcher of a job SIGTERM once. srun itself would end the step without a save."""
_COMMAND_S = 60.0
_MOST_NODES = 100_000
_LOOK_S = 5.0
_STAYS_S = 60.0
"""Seconds srun may stay after the end of the life: it waits for ever for a node whose slurmstepd was killed."""
_ENDS_S = 30.0
_REQUEUED_S = 60.0
"""Most seconds that this process survives its requeueing."""


class Batch:
    """One run of the batch script."""

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = commands.srun_environment(environ, requeues=plan.job)
        self._asked: list[signal.Signals] = []
        self._requests = SecondRequest()
        self._is_to_pass_on = False
        self._reported_bad: dict[str, str] = {}

    def run(self) -> int:
        """Run until the job ends or is requeued, and return the exit code."""
        flag = self._environ.get("FAULT_TOL_FINISHED_FLAG_FILE", "")
        if flag and os.path.exists(flag):
            say(f"nothing to do: {flag} is there, the training is finished")
            return 0
        ours = [name for name in sorted(self._environ) if name.startswith(_OURS) and name not in commands.FOR_LAUNCHERS]
        if missing := commands.not_exported(commands.export_of(self._plan.srun_options), ours):
            say(f"warning: srun's --export keeps {', '.join(missing)} from the launchers; to pass all: --export=ALL")
        with self._taking_signals() as wake:
            nodes, steps = self._plan.nodes, 0
            while True:
                steps += 1
                before = len(self._lives().lives)
                code = self._step(nodes, before, wake)
                lives, job = self._lives(), self._allocation()
                nodes = self._plan.nodes if job is None else job.nodes
                follows = decide(
                    self._plan,
                    lives.lives,
                    before=before,
                    code=code,
                    asked=self._asked[0].name if self._asked else "",
                    nodes=nodes,
                    steps=steps,
                )
                for node, reason in lives.bad_nodes().items():
                    if self._reported_bad.get(node) != reason:
                        self._reported_bad[node] = reason
                        say(advice("slurm", node, reason))
                if follows.action is BatchAction.SRUN:
                    say(f"{follows.why}; starting another step in this allocation")
                    continue
                if follows.action is BatchAction.REQUEUE:
                    return self._again(follows, lives, "" if job is None else job.state)
                say(follows.why)
                return follows.code

    def print_commands(self) -> None:
        """Print the commands without running them."""
        plan = self._plan
        print(shlex.join(self._srun(plan.nodes)))
        print(f"# on SIGTERM, SIGUSR1 or SIGUSR2: {shlex.join([*_STOP, plan.job])}")
        print(f"# then, from {os.path.join(plan.log_dir, LIVES_FILE)}:")
        print(f"#   lost or failed: {shlex.join(batch_script.show(plan.job))}, and srun again if enough nodes are left")
        most = plan.max_lives
        again = f"{shlex.join(batch_script.requeue(plan.job))}, for up to {most} lives" if most > 1 else "end: 1 life"
        print(f"#   stopped, or lost with too few nodes: {again}")
        print("#   finished: end with 0; no progress: end with 93")
        if plan.excludes_bad_nodes:
            print(f"#   before that, to exclude bad nodes: {shlex.join(_avoid(plan.job, ['NODE,...']))}")

    # -- one step ---------------------------------------------------------------------------------------------

    def _step(self, nodes: int, before: int, wake: socket.socket) -> int:
        words = self._srun(nodes)
        say(shlex.join(words))
        try:
            # a session of its own: signals to this script's group aren't for srun
            step = subprocess.Popen(words, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            say(f"srun can't be started: {error.strerror}")
            return TRY_AGAIN_CODE
        pidfd = os.pidfd_open(step.pid)
        over_s: float | None = None
        try:
            while step.poll() is None:
                ready, _, _ = select.select([pidfd, wake.fileno()], [], [], _LOOK_S)
                if wake.fileno() in ready:
                    wake.recv(4096)
                if self._is_to_pass_on:  # the ranks save; a second signal asks the launchers to be quick
                    self._is_to_pass_on = False
                    say(f"received {self._asked[-1].name}: sending SIGTERM to the launchers")
                    self._command([*_STOP, self._plan.job])
                life, now_s = self._ended(before), time.monotonic()
                over_s = None if life is None else over_s or now_s
                if life is not None and over_s is not None and now_s > over_s + _STAYS_S:
                    say(f"the life has ended, but srun still runs {_STAYS_S:.0f} s later: terminating srun")
                    return _end(step, life)
        finally:
            os.close(pidfd)
        return step.returncode if step.returncode >= 0 else 128 - step.returncode

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[socket.socket]:
        read, write = socket.socketpair()
        with read, write:
            write.setblocking(False)
            before = {number: signal.signal(number, self._note) for number in _SIGNALS}
            old = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
            try:
                yield read
            finally:
                signal.set_wakeup_fd(old)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._asked.append(signal.Signals(number))
        # note the arrival time: the command that passes on the first signal may take longer than the gap to the second
        if self._requests.note(time.monotonic()) is not Asked.SAME:
            self._is_to_pass_on = True

    # -- what follows -----------------------------------------------------------------------------------------

    def _again(self, follows: Next, lives: Lives, state: str) -> int:
        if state not in ("", "RUNNING", "TIMEOUT", "NODE_FAIL"):
            say(f"{follows.why}; not requeueing: Slurm reports the job as {state}")
            return TRY_AGAIN_CODE
        if self._plan.excludes_bad_nodes and (bad := sorted(lives.bad_nodes())):
            self._command(_avoid(self._plan.job, bad))
        say(f"{follows.why}; requeueing job {self._plan.job}")
        if self._command(batch_script.requeue(self._plan.job)) is None:
            return TRY_AGAIN_CODE
        time.sleep(_REQUEUED_S)  # Slurm ends this process now, whatever its exit code
        return 0

    def _excluded(self, nodes: int) -> list[str]:
        """Return the bad nodes of this allocation that aren't needed."""
        if not self._plan.excludes_bad_nodes:
            return []
        job = self._allocation()
        bad = self._lives().bad_nodes()
        here = [] if job is None else [name for name in expand_hosts(job.hosts, _MOST_NODES) if name in bad]
        return here[: max(0, nodes - self._plan.needed)]

    def _srun(self, nodes: int) -> list[str]:
        plan, excluded = self._plan, self._excluded(nodes)
        count = nodes - len(excluded)
        return commands.srun(nodes=count, exclude=excluded, more=plan.srun_options, launcher=plan.launcher)

    # -- files and commands -----------------------------------------------------------------------------------

    def _lives(self, *, quietly: bool = False) -> Lives:
        path = os.path.join(self._plan.log_dir, LIVES_FILE)
        try:
            return Lives.parse(read_own(path))
        except (OSError, ValueError) as error:
            if not quietly and not isinstance(error, FileNotFoundError):
                say(f"{path} can't be read: {error}")
            return Lives()

    def _ended(self, before: int) -> Life | None:
        """Return the life that this step began, once it has ended; a file system that is silent may tell later."""
        lives: tuple[Life, ...] = bounded_call(lambda: self._lives(quietly=True).lives, ())
        return lives[-1] if len(lives) > before and lives[-1].outcome is not Ending.RUNNING else None

    def _allocation(self) -> commands.Job | None:
        answer = self._command(batch_script.show(self._plan.job), quietly=True)
        return None if answer is None else commands.allocation(answer)

    def _command(self, words: Sequence[str], *, quietly: bool = False) -> str | None:
        """Run a command and return its output; None if it fails, which is reported."""
        if not quietly:
            say(shlex.join(words))
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{words[0]} fails: {error}")
            return None
        if done.returncode:
            is_ending = "Invalid job id" in done.stderr  # also of a job that is cancelled, while its steps still save
            problem = "Slurm is ending the job itself" if is_ending else done.stderr.strip()
            say(f"{shlex.join(words)} ended with code {done.returncode}: {problem}")
            return None
        return done.stdout


def _end(step: subprocess.Popen[bytes], life: Life) -> int:
    """Terminate srun: SIGTERM, then SIGKILL. Return the launchers' exit code."""
    step.terminate()
    try:
        step.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        step.kill()
        step.wait()
    return life.exit_code or 0


def _avoid(job: str, nodes: Sequence[str]) -> list[str]:
    """Return the command that keeps the job off these nodes from its next start on."""
    return ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"]


def status_on_nodes(job: int, how: str) -> int:
    """Run `megatron-ft status` on each node of a running job, with the option ``how``. Return its exit code.

    Raises:
        ConfigError: the job doesn't run, or Slurm doesn't answer.
    """
    try:
        words = batch_script.show(str(job))
        answer = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        found = commands.allocation(answer.stdout)
        if found is None:
            raise ConfigError(f"--slurm {job}: {answer.stderr.strip() or 'Slurm knows no such job'}")
        if found.state != "RUNNING":
            raise ConfigError(f"--slurm {job}: the job isn't running: Slurm reports it as {found.state}")
        # the nodes need this Python at the same path
        status = [sys.executable, "-m", "megatron_ft", "status", how]
        # beside the job, without resources; outside of the job's scripts srun would take one node if not told how many
        shape = [f"--nodes={found.nodes}", f"--ntasks={found.nodes}", "--ntasks-per-node=1", "--export=ALL", "--label"]
        stays = ["--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
        words = ["srun", f"--jobid={job}", *shape, *stays, *status]
        return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise ConfigError(f"--slurm: {words[0]} can't be started: {error.strerror}") from None


def say(text: str) -> None:
    """Print a line with the time, for the job's output file."""
    print(f"[megatron-ft slurm] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
