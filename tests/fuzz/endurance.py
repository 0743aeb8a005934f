"""A long run in a short time: section events and control messages by the million, and nothing grows.

python tests/fuzz/endurance.py --events 10000000 --messages 100000
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ft.config.kinds import DEFAULT_LOG_MAX_BYTES
from tests.fuzz.healthy import live
from tests.fuzz.storm import begin, exchange, finish
from tests.fuzz.watched import figures
from tests.support.launching import Launched

__all__ = ["endure"]

Say = Callable[[str], None]
_EVERY = 100  # messages
_HELLOS = 10
"""Of these; a monitor bears 16 callers at a time."""
_MORE_KIB, _MORE_FDS = 2000, 2
"""Between the second quarter of the run and the last one; what is used once is there by then."""
_CLOSED_S = 10.0
"""After the load; a bound."""
_MOST_LINES = 60
_KINDS_OF_LINES = 6
_CONTROL: tuple[dict[str, object], ...] = (
    {"type": "workload_control", "action": "Continue", "description": "going on", "rank": 0, "pid": 1},
    {"type": "status"},
    {"type": "workload_control", "action": "Nothing"},
    {"type": "pause"},
    {"type": "resume"},
)
_HELLO: dict[str, object] = {"type": "hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}
_SCRIPT = """
import os, sys, time
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
paths = [os.environ[f"FT_{who}_IPC_SOCKET"] for who in ("LAUNCHER", "RANK_MONITOR")]
print("sockets", *paths, os.getpid(), flush=True)
batches, end = int(sys.argv[1]), sys.argv[2]
for number in range(batches):
    client.set_iteration(number)
    for _ in range(1000):
        with client.section("step"):
            pass
    client._wake_monitor()  # else most of them would be overwritten before it looks
    if number % 20 == 19:
        time.sleep(0.005)  # nor does anybody train without a pause
print("done", flush=True)
while not os.path.exists(end):
    with client.section("step"):
        time.sleep(0.02)
client.shutdown_workload_monitoring()
"""
_EVENTS_OF_A_BATCH = 2001


def endure(directory: Path, say: Say, *, events: int, messages: int) -> None:
    """One rank under the real launcher with its real monitor.

    Raises:
        AssertionError: something grew, or somebody died.
    """
    script, end = directory / "train.py", directory / "end"
    script.write_text(_SCRIPT)
    config = ["--ft-rank-section-timeouts=step:30"]
    batches = -(-events // _EVENTS_OF_A_BATCH)
    arguments = ["--nproc-per-node=1", "--max-restarts=0", *config, str(script), str(batches), str(end)]
    launched = Launched(directory, arguments, {})
    try:
        (found,) = launched.wait_for(r"^sockets (.*)$")
        control, monitor, rank_pid = found.split()
        pids = {"launcher": launched.process.pid, "rank": int(rank_pid), **_monitor(launched)}
        samples = _load(launched, pids, control, monitor, messages, say)
        for name in pids:
            _compare(name, [sample[name] for sample in samples])
        _assert_all_closed(launched, pids, samples)
        end.touch()
        finished = launched.wait(120)
        assert finished.code == 0, finished.err[-3000:]
        assert "Traceback" not in finished.err, finished.err[-3000:]
        assert not any("damaged" in line or "replaced" in line for line in finished.lines), finished.lines
        # each kind of them comes once a minute in the long run
        most = _MOST_LINES + _KINDS_OF_LINES * finished.seconds / 60
        assert len(finished.lines) < most, (len(finished.lines), finished.seconds)
        told = f"{batches * _EVENTS_OF_A_BATCH} events, {messages} messages"
        say(f"{told}: nothing grew; {len(finished.lines)} lines, logs of {samples[-1]['monitor']['log_bytes']} bytes")
    finally:
        launched.destroy()


def _monitor(launched: Launched) -> dict[str, int]:
    (pid,) = launched.monitor_pids().values()
    return {"monitor": pid}


def _load(
    launched: Launched, pids: dict[str, int], control: str, monitor: str, messages: int, say: Say
) -> list[dict[str, dict[str, int]]]:
    """Messages while the rank does its events, and until both are done; what was used meanwhile."""
    samples: list[dict[str, dict[str, int]]] = []
    sent, began, told = 0, time.monotonic(), -1e9
    while sent < messages or "\ndone" not in launched.out:
        if sent < messages:
            _send(control, monitor, sent)
            sent += _EVERY
        else:
            time.sleep(0.05)
        assert launched.process.poll() is None, launched.err[-3000:]
        samples.append({name: figures(pid, launched.log_dir) for name, pid in pids.items()})
        most = 2.2 * 3 * DEFAULT_LOG_MAX_BYTES  # of three processes; the newest record may be the one too many
        assert samples[-1]["monitor"]["log_bytes"] < most, samples[-1]
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"{told - began:6.1f} s, {sent} messages: {samples[-1]}")
    exchange(control, {"type": "resume"})
    return samples


def _send(control: str, monitor: str, first: int) -> None:
    """``_EVERY`` messages at the same time, and their answers; one that is refused has none, the launcher hangs up."""
    sent = []
    for number in range(first, first + _EVERY):
        is_hello = number % 4 == 3 and number % _EVERY < 4 * _HELLOS
        message = _HELLO if is_hello else _CONTROL[number % len(_CONTROL)]
        sent.append((message, begin(monitor if is_hello else control, message)))
    for message, sock in sent:
        try:
            answer = finish(sock)
        except (struct.error, ConnectionError):
            answer = b""
        assert bool(answer) == (message.get("action") != "Nothing"), (message, answer)


def _compare(name: str, samples: Sequence[dict[str, int]]) -> None:
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    # a log that is bounded has two files from some moment on
    for key, most in (("own_kib", _MORE_KIB), ("log_files", 4)):
        before = statistics.median(sample[key] for sample in early)
        after = statistics.median(sample[key] for sample in late)
        assert after <= before + most, f"{key} of the {name} went from {before:g} to {after:g}"


def _assert_all_closed(launched: Launched, pids: dict[str, int], samples: Sequence[dict[str, dict[str, int]]]) -> None:
    """Under load connections are just being closed, on a busy machine dozens of them; a leak is there after it, too."""
    for name, pid in pids.items():
        before = min(sample[name]["fds"] for sample in samples)
        deadline = time.monotonic() + _CLOSED_S
        while (now := figures(pid, launched.log_dir)["fds"]) > before + _MORE_FDS:
            assert time.monotonic() < deadline, f"the {name} had {before} descriptors open, and keeps {now}"
            time.sleep(0.05)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--messages", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        endure(Path(directory), lambda text: print(text, flush=True), events=args.events, messages=args.messages)
    simulated = args.events // 20
    for says_sigcont in (True, False):
        live(simulated, says_sigcont=says_sigcont)
    told = f"{2 * simulated} events of a simulated rank whose node is stopped now and then"
    print(f"{told}: it was never terminated", flush=True)


if __name__ == "__main__":
    main()
