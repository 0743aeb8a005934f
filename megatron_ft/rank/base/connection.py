"""Messages of a rank over sockets: the hello to its monitor, and a request to its launcher."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import ConfigError, NotUnderLauncherError, ProtocolError, RankMonitorClientError
from megatron_ft.link.base.codec import Fact, Message
from megatron_ft.link.base.control import WorkloadControl, WorkloadControlRequest
from megatron_ft.link.base.rank_variables import is_the_rank
from megatron_ft.link.board import Board
from megatron_ft.link.messages.rank_messages import TO_RANK, RankHello, RankRefused
from megatron_ft.link.wire import ChannelClosedError, Received, close_fds, connect
from megatron_ft.rank.base import agreement, say, user_code
from megatron_ft.rank.base.agreement import RankInfo

MONITOR_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
LAUNCHER_SOCKET = "FT_LAUNCHER_IPC_SOCKET"
REQUIRE_LAUNCHER = "FT_REQUIRE_LAUNCHER"
"""Variable that makes hooks without a launcher an error, if it is 1."""
_WELCOME_FDS = 4
_PATIENCE_S = 30.0
_ANSWER_S = 10.0
_RETRY_S = 0.02
SOCKET_RETURNS_S = 5.0
"""Seconds until a missing socket is an error: the launcher restores a lost socket directory within a second."""


def has_launcher() -> bool:
    """Return True in a rank of ``ft_launcher``. Elsewhere hooks do nothing, after one warning.

    Raises:
        NotUnderLauncherError: there is no launcher, and FT_REQUIRE_LAUNCHER is 1.
    """
    if os.environ.get(MONITOR_SOCKET):
        if not is_the_rank(os.environ):
            say.warn("fault tolerance is off: another launcher has started this process within a rank of ft_launcher")
            return False
        return True
    if os.environ.get(REQUIRE_LAUNCHER) == "1":
        raise NotUnderLauncherError(
            f"no rank monitor: {MONITOR_SOCKET} is not set; start this script with ft_launcher "
            f"(or unset {REQUIRE_LAUNCHER})"
        )
    say.warn(f"not started with ft_launcher: fault tolerance is off ({REQUIRE_LAUNCHER}=1 makes this an error)")
    return False


class MonitorWelcome(NamedTuple):
    """Resources a monitor gives to its rank; the receiver closes the descriptors."""

    config: FaultToleranceConfig
    board: Board
    wake_fd: int
    stack_fd: int
    ask_fd: int
    log_dir: str | None
    run_id: str


def say_hello(
    info: RankInfo,
    warmup_iterations: int,
    *,
    watch_only: bool = False,
    state_path: str = "",
    learns: bool = False,
) -> MonitorWelcome:
    """Introduce this rank to its monitor; the arguments are those of `RankHello`.

    The launcher replaces a monitor that dies or is stopped in between, so this retries for a while.

    Raises:
        RankMonitorClientError: no monitor listens, it refuses, or it doesn't answer within 30 s.
    """
    path = os.environ[MONITOR_SOCKET]
    hello = RankHello(
        cycle=info.cycle,
        rank=info.global_rank,
        warmup_iterations=warmup_iterations,
        user_code_ns=user_code.began_ns,
        has_group=agreement.has_process_group(),
        watch_only=watch_only,
        state_path=state_path,
        learns=learns,
    )
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _read_welcome(_exchange(path, hello))
        except (ChannelClosedError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise RankMonitorClientError(f"the rank monitor at {path} does not answer: {error}") from None
            hello = replace(hello, again=True)  # the monitor that died may have reported this rank already
            time.sleep(_RETRY_S)
        except (OSError, ProtocolError) as error:
            raise RankMonitorClientError(f"no rank monitor at {path}: {error}") from None


def ask_launcher(path: str, request: WorkloadControlRequest, rank: int) -> None:
    """Send a request to the launcher and wait for its acknowledgement.

    Raises:
        RankMonitorClientError: the launcher isn't running or doesn't answer.
    """
    message = WorkloadControl(action=request.action.name, description=request.description, rank=rank)
    try:
        answer = _exchange(path, message)
    except (ChannelClosedError, OSError, ProtocolError) as error:
        raise RankMonitorClientError(f"the launcher at {path} did not take the request: {error}") from None
    close_fds(answer.fds)


def _exchange(path: str, message: Message | Fact) -> Received:
    deadline = time.monotonic() + SOCKET_RETURNS_S
    while True:
        try:
            channel = connect(path, _ANSWER_S)
            break
        except (FileNotFoundError, ConnectionRefusedError):  # no socket, or no process listens yet
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
    try:
        channel.send(message, timeout_s=_ANSWER_S)
        return channel.wait_message(_ANSWER_S)
    finally:
        channel.close()


def _read_welcome(answer: Received) -> MonitorWelcome:
    fds = answer.fds
    try:
        welcome = TO_RANK.parse(answer.message)
        if isinstance(welcome, RankRefused):
            raise RankMonitorClientError(f"the rank monitor refused: {welcome.reason}")
        if len(fds) != _WELCOME_FDS:
            raise ProtocolError(f"a welcome comes with {_WELCOME_FDS} descriptors, not {len(fds)}")
        config = FaultToleranceConfig.from_dict(welcome.config)
        board = Board(fds[0])
    except RankMonitorClientError:
        close_fds(fds)
        raise
    except (ProtocolError, ConfigError, OSError, ValueError) as error:
        close_fds(fds)
        raise ProtocolError(f"the welcome can't be used: {error}") from None
    board_fd, wake_fd, stack_fd, ask_fd = fds
    os.close(board_fd)  # the mapping holds the memory from now on
    return MonitorWelcome(config, board, wake_fd, stack_fd, ask_fd, welcome.log_dir, welcome.run_id)
