"""``RankMonitorClient``: connection of a training script to its monitor."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import NotUnderLauncherError, RankMonitorClientError
from megatron_ft.learning.rule import enforced_armed_s
from megatron_ft.learning.timeouts import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    floored,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.link.base import layout
from megatron_ft.link.base.control import WorkloadControlRequest
from megatron_ft.link.base.intervals import WARMUP
from megatron_ft.link.base.wording import listed
from megatron_ft.link.board import Board
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor
from megatron_ft.link.log import RANK
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.base.connection import (
    LAUNCHER_SOCKET,
    ask_launcher,
    has_launcher,
    say_hello,
)
from megatron_ft.rank.base.say import warn
from megatron_ft.rank.client.calculating import calculate_over_ranks
from megatron_ft.rank.client.recorder import Recorder
from megatron_ft.rank.collectives import watch
from megatron_ft.rank.crash_reporter.reporter import CrashReporter
from megatron_ft.rank.reference.finder import say_whose

_clients: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


class RankMonitorClient:
    """Connects one rank to its monitor. The hooks of a client are to be called from one thread.

    After :meth:`init_workload_monitoring` everything travels through shared memory: no hook waits for the monitor, and
    none fails because the monitor is dead or stopped (the launcher replaces it). Monitoring ends with
    :meth:`shutdown_workload_monitoring`, with the process, or with the last reference to the client.

    In a script that wasn't started with ``ft_launcher``, :meth:`init_workload_monitoring` warns once and all calls do
    nothing; with FT_REQUIRE_LAUNCHER=1 in the environment it raises.
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"
    """Key of the timeouts in ``state_dict()``; existing code reads it."""
    _leaves_out_open_sections = False
    """If True, skip a selected section that is open and was never closed, instead of raising."""

    def __init__(self) -> None:
        """Create a client without any I/O."""
        self.is_initialized = False
        self.cfg: FaultToleranceConfig | None = None
        self.rank_info: RankInfo | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self._section_timeouts: SectionTimeouts | None = None
        self._recorder: Recorder | None = None
        self._is_off = False
        """True from initialisation on if there is no launcher: every call does nothing."""
        self._board: Board | None = None
        self._wake = KeptDescriptor(-1)
        self._crash_reporter = CrashReporter()
        self._loaded: Mapping[str, Any] | None = None
        self._log_dir: str | None = None
        self._run_id = ""
        _clients.add(self)

    @property
    def section_timeouts(self) -> SectionTimeouts | None:
        """Timeouts of the sections API; those that the launcher has learned are among the calculated ones."""
        own = self._section_timeouts
        if own is None or self._board is None:
            return own
        learned = enforced_armed_s(self._board.words, [*own.section, OUT_OF_SECTION])
        return own.with_calculated({name: timeout for name, timeout in learned.items() if name not in own.calculated})

    @section_timeouts.setter
    def section_timeouts(self, timeouts: SectionTimeouts | None) -> None:
        self._section_timeouts = timeouts

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Connect to this rank's monitor, receive the configuration, and start monitoring.

        Args:
            num_warmup_iters: length of the warm-up, in which the timeouts of "step" and out of section are at least
            ``initial_rank_heartbeat_timeout`` (an hour by default). The warm-up ends when the iteration after this many
            begins (:meth:`set_iteration`), or when the first "step" is opened. A job without iterations and without a
            section "step" has no warm-up. None is 0.

        Raises:
            NotUnderLauncherError: the script wasn't started with ``ft_launcher``, and FT_REQUIRE_LAUNCHER is 1.
            RankMonitorClientError: monitoring is initialised already, or the monitor refuses or doesn't answer.
        """
        self._connect(num_warmup_iters)

    def _connect(self, num_warmup_iters: int | None, *, state_path: str = "", learns: bool = False) -> None:
        """Implement ``init_workload_monitoring``.

        ``state_path``: absolute path of the file of learned timeouts, which the launcher reads and writes; empty if
        there is none. ``learns``: the script asks for learned timeouts.
        """
        if self.is_initialized:
            raise RankMonitorClientError(
                "workload monitoring is initialized already; call shutdown_workload_monitoring() before"
            )
        if num_warmup_iters is not None and (not isinstance(num_warmup_iters, int) or num_warmup_iters < 0):
            raise RankMonitorClientError(f"num_warmup_iters must be a whole number >= 0, got {num_warmup_iters!r}")
        if not has_launcher():
            self.is_initialized = self._is_off = True
            return
        info = RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
        watch.hooks_begin()
        welcome = say_hello(info, num_warmup_iters or 0, state_path=state_path, learns=learns)
        cfg = welcome.config
        self.rank_info, self.cfg = info, cfg
        if cfg.is_set("log_level"):
            RANK.set_level(cfg.log_level)
            RANK.debug("rank", info.global_rank, "is monitored with", cfg.to_dict())
        self.hb_timeouts = HeartbeatTimeouts(cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout, False)
        self._section_timeouts = SectionTimeouts(
            dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout, set(), False
        )
        self._board = welcome.board
        self._wake = KeptDescriptor(welcome.wake_fd)
        self._log_dir, self._run_id = welcome.log_dir, welcome.run_id
        self._recorder = Recorder(self._board, self._section_timeouts)
        self._crash_reporter.begin(self._board, welcome.stack_fd, welcome.ask_fd)
        watch.hooks_connected(self._board)
        self.is_initialized = True
        say_whose(info.cycle)
        if self._loaded is not None:
            self._apply(self._loaded)

    def send_heartbeat(self) -> None:
        """Tell the monitor that this rank is alive.

        Raises:
            RankMonitorClientError: not initialised.
        """
        if not self._is_off:
            self._ready().heartbeat()

    def set_iteration(self, n: int) -> None:
        """Tell the monitor that training iteration ``n`` (from 0) has begun: ``n`` are done. For verdicts and reports.

        Raises:
            RankMonitorClientError: not initialised, or ``n`` is negative.
        """
        if not self._is_off:
            self._ready().iteration(n)

    def start_section(self, section: str) -> None:
        """Open a section. Sections may nest; each open section has its own timeout.

        A section that isn't configured is skipped: it isn't watched, and a warning is printed once.

        Raises:
            RankMonitorClientError: not initialised, or the section is open already.
        """
        recorder = self._recorder
        if recorder is not None:
            recorder.start(section)
        elif not self._is_off:
            raise _not_initialized()

    def end_section(self, section: str) -> None:
        """Close an open section; a section that isn't configured is skipped.

        Raises:
            RankMonitorClientError: not initialised, or the section isn't open.
        """
        recorder = self._recorder
        if recorder is not None:
            recorder.end(section)
        elif not self._is_off:
            raise _not_initialized()

    def end_all_sections(self) -> None:
        """Close all open sections, innermost first; with none open, do nothing.

        Raises:
            RankMonitorClientError: not initialised.
        """
        if self._is_off:
            return
        recorder = self._ready()
        for section in reversed(recorder.open_sections):
            recorder.end(section)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """``with client.section("step"):`` opens and closes a section, also when an exception passes."""
        self.start_section(name)
        try:
            yield
        finally:
            # the body may have shut monitoring down or closed all sections
            if self._recorder is not None and name in self._recorder.open_sections:
                self.end_section(name)

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set both heartbeat timeouts from the observed intervals. Collective: all ranks must call it.

        No calculated timeout is enforced below ``learned_floor`` (60 s).

        Returns:
            True if the timeouts were set; False without a launcher, or with ``skip_if_not_ready`` before any rank has
            sent two heartbeats.

        Raises:
            RankMonitorClientError: not initialised, or (without ``skip_if_not_ready``) not enough heartbeats.
        """
        if self._is_off:
            return False
        recorder = self._ready()
        assert self.hb_timeouts is not None
        observed = {"initial": recorder.initial_heartbeat, "subsequent": recorder.longest_heartbeat}
        old = self.hb_timeouts
        before = {"initial": old.initial, "subsequent": old.subsequent} if old.were_calculated else {}
        result, missing = calculate_over_ranks(observed, {}, before, self._given.safety_factor)
        if missing:
            return self._not_ready("no rank has sent two heartbeats yet", skip_if_not_ready)
        self.hb_timeouts = HeartbeatTimeouts(result["initial"], result["subsequent"], True)
        recorder.restart_clocks()
        self._write_timeouts()
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Sequence[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Set section timeouts from the observed intervals. Collective: all ranks call it with the same arguments.

        A section counts as observed once it has ended; then the age of one that is still open counts, too. No
        calculated timeout is enforced below ``learned_floor`` (60 s; "setup": four times that).

        Args:
            selected_sections: names of the sections to calculate, None for all; names that aren't configured are
            ignored.
            calc_out_of_section: calculate the timeout out of section, too.
            skip_if_not_ready: return False instead of raising if a selected section was never observed.

        Returns:
            True if the timeouts were set; False without a launcher.

        Raises:
            RankMonitorClientError: not initialised, or a selected section was never observed.
        """
        if self._is_off:
            return False
        recorder = self._ready()
        timeouts = self._section_timeouts
        assert timeouts is not None
        names = list(timeouts.section) if selected_sections is None else list(dict.fromkeys(selected_sections))
        known = [name for name in names if name in timeouts.section]
        keys = [*known, OUT_OF_SECTION] if calc_out_of_section else known
        if names and not keys:
            return self._not_ready(f"none of the sections {names} is configured", True)
        observed = recorder.observed()
        result, missing = calculate_over_ranks(
            {key: observed[key] for key in keys},
            recorder.open_ages(),
            timeouts.calculated,
            self._given.safety_factor,
            leaves_out_open=self._leaves_out_open_sections and selected_sections is not None,
        )
        if missing:
            return self._not_ready(f"no rank has seen the end of {missing} yet", skip_if_not_ready)
        self._section_timeouts = timeouts.with_calculated(result)
        recorder.restart_clocks()
        self._write_timeouts()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the calculated timeouts, JSON-serialisable and equal on all ranks, without configured ones."""
        sections = self.section_timeouts
        return state_to_dict(
            self.hb_timeouts, None if sections is None else SectionTimeouts().with_calculated(sections.calculated)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use timeouts calculated by an earlier run; before initialisation, from initialisation on.

        Raises:
            ConfigError: the state is malformed (a ValueError); nothing is changed.
        """
        state_from_dict(state)
        self._loaded = state
        if self.is_initialized and not self._is_off:
            self._apply(state)

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Send a request to this node's launcher, and return once it is acknowledged.

        Raises:
            RankMonitorClientError: there is no launcher, or it doesn't answer.
        """
        if self._is_off:
            return
        path = os.environ.get(LAUNCHER_SOCKET)
        if not path:
            raise NotUnderLauncherError(
                f"no launcher: {LAUNCHER_SOCKET} is not set; start this script with ft_launcher"
            )
        ask_launcher(path, req, RankInfo.from_environment(os.environ, "", os.getpid()).global_rank)

    def shutdown_workload_monitoring(self) -> None:
        """End the monitoring of this rank at once, without waiting for the monitor. Idempotent."""
        if not self.is_initialized:
            return
        if self._is_off:
            self.is_initialized = self._is_off = False
            return
        assert self._board is not None
        self._crash_reporter.note_rerun()
        self._board.words[layout.W_CLOSING] = layout.CLOSING
        self._wake_monitor()
        self._disconnect()

    def _leave(self, error: BaseException) -> None:
        """End the monitoring because of an exception, which is reported."""
        if self.is_initialized and not self._is_off:
            self._crash_reporter.leave(error)
        self.shutdown_workload_monitoring()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # no progress can be reported any more. At the interpreter's exit, monitoring goes on: a hang there is detected
        if getattr(self, "is_initialized", False) and not is_finalizing():
            self.shutdown_workload_monitoring()

    def _add_sections(self, names: Sequence[str]) -> None:
        """Add unconfigured sections without a timeout. Name configured ones that only the script itself can open."""
        recorder = self._ready()
        assert self._section_timeouts is not None
        configured = self._section_timeouts.section
        added = [name for name in names if name not in configured]
        for name in added:
            recorder.add_section(name)
            self._section_timeouts.section = {**self._section_timeouts.section, name: None}
        for name, timeout_s in configured.items():
            if timeout_s is not None and name not in (*names, WARMUP):
                warn(f"section '{name}' has a timeout, and the hooks never open it: they open {listed(names)}")
        if added:
            self._write_timeouts()

    @property
    def _given(self) -> FaultToleranceConfig:
        assert self.cfg is not None
        return self.cfg

    def _not_ready(self, reason: str, skip: bool) -> bool:
        if skip:
            return False
        raise RankMonitorClientError(f"{reason}, so no timeout can be calculated")

    def _apply(self, state: Mapping[str, Any]) -> None:
        heartbeats, learned = state_from_dict(state)
        timeouts = self._section_timeouts
        assert timeouts is not None
        # a section that is no longer configured has neither a slot on the board nor a timeout
        names = {*timeouts.section, OUT_OF_SECTION}
        self._section_timeouts = timeouts.with_calculated(
            {name: value for name, value in learned.calculated.items() if name in names}
        )
        self.hb_timeouts = heartbeats or self.hb_timeouts
        self._write_timeouts()

    def _write_timeouts(self) -> None:
        assert self._section_timeouts is not None
        assert self.hb_timeouts is not None
        floor_s, sections, beats = self._given.learned_floor, self._section_timeouts, self.hb_timeouts
        if beats.were_calculated:
            own = {"initial": beats.initial, "subsequent": beats.subsequent}
            beats = HeartbeatTimeouts(**floored(own, floor_s), were_calculated=True)
        self._ready().write_timeouts(sections.with_calculated(floored(sections.calculated, floor_s)), beats)
        self._wake_monitor()

    def _wake_monitor(self) -> None:
        # an eventfd never blocks here: that would take 2**64 - 1 unread wake-ups
        if self._wake.is_ours:  # else the monitor reads the board when the next timeout is due
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake.number, 1)

    def _ready(self) -> Recorder:
        if self._recorder is None:
            raise _not_initialized()
        return self._recorder

    def _disconnect(self) -> None:
        self.is_initialized = False
        self._recorder = None
        self._section_timeouts = self.section_timeouts
        if self._board is not None:
            watch.hooks_end(self._board)
            self._board.close()
            self._board = None
        self._wake.close()
        self._crash_reporter.end()
        self._log_dir = None


def _not_initialized() -> RankMonitorClientError:
    return RankMonitorClientError("workload monitoring is not initialized; call init_workload_monitoring() first")


def _disarm_in_child() -> None:
    """Disconnect a forked child (a data-loader worker): its hooks must not report for the rank."""
    for client in list(_clients):
        client._crash_reporter.forget(in_child=True)
        client._disconnect()


os.register_at_fork(after_in_child=_disarm_in_child)
