"""Who did it, and where: the short form of ``make verdicts``, and what stays behind as evidence."""

from __future__ import annotations

import json
import re
import stat
import sys
from typing import Any

import pytest

from tests.support.launching import Launched, Launcher
from tests.verdicts.campaign import CRASHES, Verdict, arguments, draw, read_verdicts

SEED = 17
HANGS = ("stopped", "spin", "gil", "collective")
"""Those of ``make verdicts`` that leave evidence of different kinds."""
TIMEOUT_S = 5.0
"""On a machine that is busy with other tests, too, no healthy step takes so long."""
BOUND_S = 2.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One job of 4 ranks that meets each of these faults once: its launch, and a verdict for each of them."""
    launcher = Launcher(tmp_path_factory.mktemp("verdicts"))
    faults = draw((*HANGS, *CRASHES), 1, SEED)
    try:
        launched = launcher.start(arguments(faults, launcher.directory, timeout_s=TIMEOUT_S))
        finished = launched.wait(110)
        assert finished.code == 0, finished.err
        launched.assert_nothing_left()
        yield launched, read_verdicts(faults, launched.log_dir)
    finally:
        for launched in launcher.launches:
            launched.destroy()


def evidence(launched: Launched, cycle: int) -> dict[int, dict[str, Any]]:
    """By rank."""
    documents = [
        json.loads(path.read_text()) for path in (launched.log_dir / "evidence").glob(f"*/*-cycle{cycle}-*.json")
    ]
    return {document["rank"]: document for document in documents}


def test_every_fault_is_blamed_on_its_rank_and_frame_in_bounded_time(job: tuple[Launched, list[Verdict]]) -> None:
    launched, verdicts = job
    wrong = [verdict for verdict in verdicts if not verdict.is_right or verdict.frame_is_right is False]
    assert wrong == []
    for verdict in verdicts[: len(HANGS)]:
        assert max(verdict.collected_s) <= BOUND_S
        assert verdict.kill_after_s is not None
        assert verdict.kill_after_s <= BOUND_S + 2.0  # a loaded machine
    # the sections of the short cycle that ended well, summed up
    rows = [row for m in launched.events("minute") if m["cycle"] == len(verdicts) for row in m["ranks"]]
    assert sum(sections["step"][0] for rank, *_, sections in rows if rank == 0 and "step" in sections) == 12


def test_a_hang_leaves_evidence_on_every_rank(job: tuple[Launched, list[Verdict]]) -> None:
    launched, verdicts = job
    for cycle, verdict in enumerate(verdicts[: len(HANGS)]):
        documents = evidence(launched, cycle)
        assert documents.keys() == {0, 1, 2, 3}
        culprit = documents[verdict.fault.rank]
        assert culprit["frame"].endswith(f"fault_{verdict.fault.kind}")
        assert any(thread["main"] for thread in culprit["threads"])
        others = [document for rank, document in documents.items() if rank != verdict.fault.rank]
        if verdict.fault.kind == "stopped":
            continue  # it is continued for a moment, to write its stacks: the others may get a step further
        assert all(document.get("in_flight") or document.get("waits_in") for document in others), others


def test_evidence_is_for_its_owner_and_for_people(job: tuple[Launched, list[Verdict]]) -> None:
    launched, verdicts = job
    directory = launched.log_dir / "evidence"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.glob("*/*")} == {0o600}
    told = {event["file"] for event in launched.events("evidence", "monitor") + launched.events("evidence")}
    assert {launched.log_dir / name for name in told} == set(directory.glob("*/*.txt"))
    page = next(directory.glob(f"*/rank{verdicts[1].fault.rank}-cycle1-*.txt")).read_text()
    for words in ("in job.py:", "section:      step, open for", "main thread (innermost call first, by faulthandler):"):
        assert words in page


def test_control_characters_of_an_exception_do_not_reach_the_terminal(launcher: Launcher) -> None:
    script = r"""
raise ValueError("boom \x1b]0;pwned\x07 \x1b[2J\r\n[ft_launcher] all is well\r")
"""
    launched = launcher.start(script, "--redirects=3", "--ft-log-level=DEBUG")
    finished = launched.wait()
    assert finished.code == 1
    # the launcher's lines, and torch's table of the failures
    assert all(char.isprintable() or char == "\n" for char in finished.err)
    (line,) = (line for line in finished.lines if line.startswith("cycle 0 ended"))
    assert r"rank 0 raised ValueError: boom \x1b]0;pwned\x07 \x1b[2J [ft_launcher] all is well" in line
    assert "all is well" not in [line.strip() for line in finished.lines]
    (page,) = (launched.log_dir / "evidence").glob("*/*.txt")
    assert all(char.isprintable() or char == "\n" for char in page.read_text())


def test_reason_that_only_the_interpreter_knows_is_told_with_the_rank_that_hangs(launcher: Launcher) -> None:
    """A dead worker, a dead thread, an exception whose ``finally`` waits."""
    script = """
import multiprocessing, queue, threading
import torch, torch.distributed as dist
from megatron_ft import RankMonitorClient
def write():
    os.kill(os.getpid(), signal.SIGKILL)
def load():
    raise KeyError("shard-0042")
def wait_for_worker():
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    context.Process(target=write).start()
    answers.get()
def step():
    raise ValueError("sample 17 is broken")
def main():
    dist.init_process_group("gloo")
    other = dist.new_group()
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section("step")
    if RANK == 1 and CYCLE == 0:
        wait_for_worker()
    if RANK == 1 and CYCLE == 1:
        threading.Thread(target=load, name="loader").start()
        queue.Queue().get()
    if RANK == 1 and CYCLE == 2:
        try:
            step()
        finally:
            dist.barrier(group=other)
    if CYCLE < 3:
        dist.all_reduce(torch.ones(1))
    client.end_section("step")
    client.shutdown_workload_monitoring()
if __name__ == "__main__":
    main()
"""
    options = ("--nproc-per-node=2", "--max-restarts=3", "--ft-max-no-progress-cycles=9")
    launched = launcher.start(script, *options, "--ft-rank-section-timeouts=step:4")
    finished = launched.wait()
    assert finished.code == 0, finished.err
    ended = [line.partition(" ended: ")[2] for line in finished.lines if re.match(r"cycle \d ended", line)]
    assert [line.partition(" in 'step'")[0] for line in ended] == ["rank 1 hung"] * 3
    killed, thread, handled = ended
    process = re.search(r"waits for its process (\d+) \((.+?)\), which was killed by SIGKILL, in ", killed)
    assert process is not None, killed
    (page,) = (launched.log_dir / "evidence").glob("*/rank1-cycle0-*.txt")
    assert f"process {process[1]} ({process[2]}), which was killed by SIGKILL" in page.read_text()
    assert re.search(r"has lost its thread loader, which died of KeyError: 'shard-0042', in script.py:\d+ load", thread)
    if sys.version_info >= (3, 11):
        assert re.search(
            r"raised ValueError: sample 17 is broken, in script.py:\d+ step, then waits in barrier #1 of group 1, in "
            r"script.py:\d+ main .*; rank 0 waits in all_reduce #1",
            handled,
        )


def test_missing_rank_is_named_where_others_have_lost_it_or_waited_too_long(launcher: Launcher) -> None:
    """Beside an exception of rank 1 that was only logged, long before a rank was killed."""
    script = """
import datetime, threading
import torch
import torch.distributed as dist
threading.excepthook = lambda a: sys.excepthook(a.exc_type, a.exc_value, a.exc_traceback)
def push_metrics():
    raise ConnectionError("metrics server is gone")
def next_batch():
    time.sleep(1000)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for i in range(4):
    client.start_section("step")
    if RANK == 1 and i == 0:
        threading.Thread(target=push_metrics).start()
    if RANK == 2 and i == 2:
        if CYCLE == 0:
            next_batch()
        if CYCLE == 1:
            os._exit(0)
        if CYCLE == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))
    client.end_section("step")
client.shutdown_workload_monitoring()
dist.destroy_process_group()
"""
    options = ("--nproc-per-node=3", "--max-restarts=3", "--ft-rank-section-timeouts=step:100")
    finished = launcher.start(script, *options).wait()
    ended = [line.partition(" ended: ")[2] for line in finished.lines if re.match(r"cycle \d ended", line)]
    assert len(ended) == 3, finished.err
    assert re.match(r"rank 2 keeps the others waiting in 'step' for .* s, in script.py:\d+ next_batch", ended[0])
    assert ended[1].startswith("rank 2 exited with 0, in the middle of training; ")
    assert ended[2].startswith("rank 2 killed by SIGKILL (not sent by ft_launcher)")
