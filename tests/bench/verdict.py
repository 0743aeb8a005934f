"""One rank of thousands hangs: how long until the verdict, and how long a launcher takes to answer meanwhile.

One real launcher, whose one rank hangs and which runs the coordinator, and a stand-in for each other launcher, with
notes on 8 ranks each, on loopback.

python tests/bench/verdict.py 1024              # launchers
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ft.core.diagnosis.collectives import Collective
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.job import messages as m
from megatron_ft.core.messages.control_messages import Status
from megatron_ft.ipc.jobs import RunningJob, connect_to, find_jobs
from megatron_ft.ipc.linux.process_setup import raise_file_limit
from megatron_ft.ipc.net.tcp import parse_address
from megatron_ft.ipc.wire import decode, encode
from tests.bench.figures import Row
from tests.bench.jobs import Enclosure, Job
from tests.bench.stand_ins import TO_MEMBER, StandIn, StandIns

__all__ = ["measure", "rows"]

_GPUS = 8
_LAST_NOTES_S = 2.1
"""One node sends its notes so many seconds after the request: after all other nodes, and within the time limit."""
_MET_S = 60.0
_QUIET_S = 3.0
_ANSWER_S = 10.0
_ASK_EVERY_S = 0.003
_ALONE = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
"""The launcher knows its rank without those of the others, which don't come to the store."""
_SCRIPT = """
import time
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
client.start_section("step")
time.sleep(600)
"""


class _Nodes(StandIns):
    """All but node 0. What their ranks wait in follows from tensor parallelism of 8, with rank 0 in no collective."""

    def __init__(self, address: str, total: int, *, job: str, rules: m.Rules) -> None:
        super().__init__(address, range(1, total), total, job=job, rules=rules)
        self._world = total * _GPUS
        self._notes = {number: encode(m.RankSnapshots(0, self._notes_of(number))) for number in range(1, total)}
        self._last = total - 1
        self._asked_s = 0.0
        self.verdict: tuple[float, m.Verdict] | None = None

    def hang(self) -> dict[str, object]:
        """A rank of node 1 is found hung. What came of it."""
        at_ns = time.monotonic_ns()
        verdict = RankHung(
            cycle=0,
            since_ns=0,
            rank=_GPUS,
            local_rank=0,
            kind="section",
            section="step",
            elapsed_s=_QUIET_S,
            timeout_s=_QUIET_S - 1,
            iteration=50,
            at_ns=at_ns,
        )
        self._all[1].send(encode(m.Hang(0, verdict)))
        until_s = time.monotonic() + _LAST_NOTES_S
        while not self._asked_s or time.monotonic() < until_s:
            self._serve()
            until_s = self._asked_s + _LAST_NOTES_S
        self._all[self._last].send(self._notes[self._last])
        last_s = time.monotonic()
        while self.verdict is None:
            self._serve()
        found_s, found = self.verdict
        return {"hung_s": at_ns / 1e9, "last_notes_s": last_s, "verdict_s": found_s, "rank": found.rank}

    def _heard(self, each: StandIn, body: bytes) -> None:
        kind = body[:60].partition(b'"type":"')[2].partition(b'"')[0]
        if kind == b"collect":
            self._asked_s = self._asked_s or time.monotonic()
            if each.number != self._last:
                each.send(self._notes[each.number])
        elif kind == b"verdict" and self.verdict is None:
            found = TO_MEMBER.parse(decode(body))
            assert isinstance(found, m.Verdict)
            self.verdict = time.monotonic(), found
        super()._heard(each, body)

    def _notes_of(self, number: int) -> tuple[RankSnapshot, ...]:
        first = _GPUS if number > 1 else 1  # the real launcher has one rank; node 1 has the others of its place, too
        return tuple(self._note(rank) for rank in range(number * _GPUS + first - _GPUS, (number + 1) * _GPUS))

    def _note(self, rank: int) -> RankSnapshot:
        tensor = range(rank // _GPUS * _GPUS, (rank // _GPUS + 1) * _GPUS)
        data = range(rank % _GPUS, self._world, _GPUS)
        group, name, number = (tensor, f"tp{rank // _GPUS}", 100) if rank < _GPUS else (data, f"dp{rank % _GPUS}", 7)
        waits = Collective(group=name, seq=number, op="all_reduce", ranks=group, backend="nccl")
        return RankSnapshot(
            rank=rank,
            local_rank=rank % _GPUS,
            pid=1000 + rank,
            iteration=50,
            section="step",
            quiet_s=_QUIET_S,
            open_s=_QUIET_S,
            found_hung=True,
            state="S",
            has_stack=True,
            frame="train.py:88 step",
            has_collectives=True,
            in_flight=(waits,),
        )


def _child(endpoint: str, total: int, arguments: Sequence[str]) -> None:
    """In a process of its own: all stand-ins. A rank hangs when a line comes, which is answered with one."""
    from megatron_ft.launcher.arguments import parse
    from megatron_ft.launcher.coordination.meeting_place import meeting_place

    raise_file_limit()
    place = meeting_place(parse(arguments), {})
    nodes = _Nodes(endpoint, total, job=place.job, rules=place.rules)
    nodes.start()
    has_met = nodes.run_until_in(0, _MET_S)
    if has_met:
        nodes.run_for(_QUIET_S)  # until the launcher has started its rank, and its standbys
    print(json.dumps(has_met), flush=True)
    if has_met and sys.stdin.readline():
        print(json.dumps(nodes.hang()), flush=True)


def measure(launchers: int) -> dict[str, float | None]:
    """Seconds; None if it never came to a verdict. ``answer_s`` is the longest of a few hundred answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    where = ("--nnodes", str(launchers), "--node-rank", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    with Enclosure("ours", "") as enclosure:
        script = enclosure.directory / "sleeping.py"
        script.write_text(_SCRIPT)
        options = (*where, "--rdzv-id", "bench")
        with Job("ours", [str(script)], reference="", ranks=1, options=options, variables=_ALONE) as job:
            _wait_for_listener(endpoint)
            same = ("--nproc-per-node", "1", "--max-restarts", "20", *options, str(script))
            with subprocess.Popen(
                [sys.executable, __file__, "--child", endpoint, str(launchers), *same],
                env=enclosure.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as child:
                try:
                    return _measure(child, job)
                finally:
                    child.kill()


def _wait_for_listener(endpoint: str) -> None:
    until_s = time.monotonic() + _MET_S
    while time.monotonic() < until_s:
        try:
            socket.create_connection(parse_address(endpoint)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)


def _measure(child: subprocess.Popen[str], job: Job) -> dict[str, float | None]:
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.readline().strip() != "true":
        return {"verdict_s": None, "answer_s": None, "is_right": 0.0}
    launcher = next(each for each in find_jobs() if each.run_dir.startswith(str(job.directory)))
    answers = _Answers(launcher)
    answers.start()
    time.sleep(0.2)
    child.stdin.write("\n")
    child.stdin.flush()
    line = child.stdout.readline()
    answers.end()
    found = json.loads(line)
    begin_s, end_s = found["hung_s"], found["verdict_s"]
    during = [took_s for at_s, took_s in answers.found if begin_s <= at_s + took_s and at_s <= end_s]
    return {
        "verdict_s": found["verdict_s"] - found["last_notes_s"],
        "answer_s": max(during),
        "answers": float(len(during)),
        "is_right": float(found["rank"] == 0),
    }


class _Answers(threading.Thread):
    """Asks a launcher for its job's status, again and again: when each question was sent, and how long it took."""

    def __init__(self, launcher: RunningJob) -> None:
        super().__init__()
        self.found: list[tuple[float, float]] = []
        self._channel = connect_to(launcher, _ANSWER_S)
        self._ends = threading.Event()

    def run(self) -> None:
        """Until ``end``."""
        while not self._ends.wait(_ASK_EVERY_S):
            at_s = time.monotonic()
            self._channel.send(Status())
            self._channel.wait_message(_ANSWER_S)
            self.found.append((at_s, time.monotonic() - at_s))
        self._channel.close()

    def end(self) -> None:
        """And wait."""
        self._ends.set()
        self.join()


def rows(found: dict[str, float | None]) -> list[Row]:
    """For the table."""
    return [
        Row("verdict on a hang, from the last of 8,192 notes", "s", found["verdict_s"]),
        Row("  it names the right rank", "of 1", found["is_right"]),
        Row("  a launcher's slowest answer meanwhile", "s", found["answer_s"]),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        print(measure(int(sys.argv[1])))
