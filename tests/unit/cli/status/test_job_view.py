"""How a whole job stands, from the records of its launchers."""

from __future__ import annotations

from megatron_ft.cli.logs.read import Entry, EventLogFile
from megatron_ft.cli.logs.runs import Run
from megatron_ft.cli.status.job_directory import JobView, NodeRow, view
from megatron_ft.job.rules.lives import Life
from megatron_ft.link.facts import launcher as records
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.monitor import FirstIteration
from megatron_ft.link.facts.shared import LogOpened
from megatron_ft.records.rules.metrics import NodeActivity as State

S = 1_000_000_000
CRASH = records.Cause(rank=3, kind=records.CauseKind.CRASH, text="rank 3 exited with code 7")
FAILED = records.CycleEnded(cycle=0, outcome="failed", cause=CRASH, action="restart", iteration=40, restarts_left=2)


def began(place: int, cycle: int = 0, left: int = 3) -> records.CycleStarted:
    return records.CycleStarted(cycle=cycle, group_rank=place, world_size=16, max_restarts=3, restarts_left=left)


def node(
    name: str, *told: Record, newest_s: float = 0.0, opened_s: float = 0.0, iteration: int | None = None
) -> list[EventLogFile]:
    """A launcher that writes one record each second, and a monitor that has written its last one at ``newest_s``."""
    entries = [Entry(round((opened_s + number) * S), record) for number, record in enumerate(told)]
    begun = [] if iteration is None else [FirstIteration(cycle=0, rank=0, iteration=iteration, at_ns=0)]
    of_monitor = [Entry(round(newest_s * S), record) for record in begun]
    return [
        log_file("launcher", name, opened_s, entries),
        *([log_file("monitor", name, 0, of_monitor)] if begun else []),
    ]


def log_file(role: str, host: str, opened_s: float, entries: list[Entry]) -> EventLogFile:
    opened = round(opened_s * S)
    header = LogOpened(schema=1, role=role, host=host, pid=1, run_id="job", wall_ns=opened)
    return EventLogFile(header=header, opened=opened, entries=tuple(entries), passed_over=0)


def seen(*nodes: list[EventLogFile], life: Life | None = None, now_s: float = 100.0) -> JobView:
    files = tuple(log for each in nodes for log in each)
    run = Run(run_id="job", files=files)
    return view(run, life, round(now_s * S))


def states(job: JobView) -> list[tuple[str, State]]:
    return [(row.name, row.state) for row in job.nodes]


def test_job_before_its_first_cycle_waits_for_nodes_to_meet() -> None:
    ill = records.NodeHealth(cycle=0, good=False, text="exited with code 3")
    job = seen(node("a"), node("b", ill))
    assert (job.cycle, job.runs) == (None, False)
    assert job.waits_for == "nodes to meet for cycle 0 (1 node recorded as ready; unfit: b)"
    assert job.nodes[1] == NodeRow(name="b", state=State.UNFIT, detail="exited with code 3", age_s=100.0)
    fit = seen(node("a"), node("b", ill, records.NodeHealth(cycle=0, good=True)))
    assert states(fit) == [("a", State.WAITING), ("b", State.WAITING)]


def test_job_between_cycles_says_what_it_waits_for_and_why_the_last_one_ended() -> None:
    other = records.CycleEnded(
        cycle=0,
        outcome="failed",
        cause=records.Cause(kind=records.CauseKind.MEMBERSHIP, text="a node was lost"),
        action="restart",
    )
    first, second = node("a", began(0), other), node("b", began(1))
    job = seen(first, second)
    assert (job.runs, job.waits_for, job.iteration) == (False, "the end of cycle 0 on b", None)
    assert states(job) == [("a", State.WAITING), ("b", State.ENDING)]
    job = seen(first, second, node("c", began(2)))  # a node that the others have lost says so, too
    assert (job.runs, job.waits_for) == (True, "")
    assert states(job) == [("a", State.STANDBY), ("b", State.TRAINING), ("c", State.TRAINING)]
    job = seen(first, node("b", began(1), FAILED))
    assert (job.runs, job.restarts_left, job.iteration) == (False, 2, 40)
    assert (job.last_cycle, job.last_cause) == (0, "rank 3 exited with code 7")
    assert job.waits_for == "nodes to meet for cycle 1 (2 nodes recorded as ready)"


def test_a_node_that_has_recorded_nothing_since_is_lost_unless_a_new_launcher_has() -> None:
    nodes = [node("a", began(0), FAILED, began(0, 1, 2)), node("b", began(1)), node("c", began(2), FAILED)]
    job = seen(*nodes)
    assert states(job) == [("a", State.TRAINING), ("b", State.LOST), ("c", State.STANDBY)]
    assert (job.restarts_left, job.last_cause) == (2, "rank 3 exited with code 7")
    job = seen(*nodes, node("b", opened_s=5.0))
    assert states(job) == [("a", State.TRAINING), ("c", State.STANDBY), ("b", State.STANDBY)]
    leaving = seen(node("a", began(0), records.StopRequested(signal="SIGTERM", ranks=8)))
    assert [(row.state, row.detail) for row in leaving.nodes] == [(State.LEAVING, "SIGTERM")]


def test_job_without_a_result_is_over_once_all_launchers_have_ended() -> None:
    first = node("a", began(0), FAILED, records.RunEnded(exit_code=94))
    job = seen(first, node("b", began(1), FAILED, records.RunEnded(exit_code=94)))
    assert (job.is_over, job.outcome, job.exit_code, job.runs, job.waits_for) == (True, None, 94, False, "")
    assert states(job) == [("a", State.ENDED), ("b", State.ENDED)]
    assert seen(first, node("b", began(1), records.RunEnded(exit_code=1))).exit_code is None
    assert not seen(first, node("b", began(1))).is_over
    assert not seen(first, node("b", began(1), FAILED)).is_over
