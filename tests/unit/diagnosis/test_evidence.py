"""The evidence on one rank: what its file holds, and the page that people read."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import CollectiveInFlight, Collectives, collectives_of
from megatron_ft.diagnosis.evidence import BoardFacts, Evidence, SectionEvidence, Stacks, Thread, evidence_text
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.diagnosis.stacks import REPORTER_THREAD, Frame
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.base.process_facts import ProcessFacts, ThreadFacts
from megatron_ft.monitor.rules.hang_detector import Overdue
from tests.support.evidence import exit_evidence, hang_evidence

BOARD = BoardFacts(
    iteration=9,
    iterations_seen=10,
    heartbeats=0,
    quiet_s=2.5,
    open_sections=(
        SectionEvidence(name="step", open_for_s=2.5, timeout_s=2.0),
        SectionEvidence(name="inner", open_for_s=1.0, timeout_s=None),
    ),
)
FLYING = CollectiveInFlight(
    group="0", description="TP", seq=4, op="all_reduce", backend="gloo", p2p=False, sizes="[[4]]"
)
TOLD = Collectives(in_flight=(FLYING,), enqueued={"gloo/0": 4}, completed={"gloo/0": 3}, ranks={"0": range(0, 100, 2)})
OURS = Frame("/x/megatron_ft/rank/crash_reporter/reporter.py", 9, REPORTER_THREAD)
HANG = hang_evidence(
    note=RankSnapshot(rank=3, local_rank=1, host="a", pid=12, iteration=9, frame="job.py:7 train", has_stack=True),
    verdict=Overdue(HangKind.SECTION, "step", 5, 2_500_000_000, 2_000_000_000, 9, ("step",)),
    board=BOARD,
    last_events=((2.5, "step begins"),),
    process=ProcessFacts(
        state="S", comm="python", wchan="futex", threads=(ThreadFacts(tid=12, comm="python", state="S", wchan=""),)
    ),
    stacks=Stacks(
        source="faulthandler",
        threads=(
            Thread(ident=255, name="", main=False, frames=(Frame("b.py", 2, "run"),)),
            Thread(ident=254, name="", main=False, frames=(OURS,)),
            Thread(ident=1, name="", main=True, frames=(Frame("job.py", 7, "train"), Frame("job.py", 9, "<module>"))),
        ),
    ),
    collectives=TOLD,
    missing=("the moon",),
)


def written(evidence: Evidence) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(evidence.packed()))
    return found


def test_evidence_file_on_a_hung_rank_has_all_fields() -> None:
    assert written(HANG) == {
        "schema": 1,
        "summary": "rank 3: in job.py:7 train, holding the GIL",
        "rank": 3,
        "local_rank": 1,
        "host": "a",
        "pid": 12,
        "iteration": 9,
        "has_stack": True,
        "frame": "job.py:7 train",
        "cycle": 0,
        "verdict": {"kind": "section", "section": "step", "elapsed_s": 2.5, "timeout_s": 2.0, "since_ns": 5},
        "board": {
            "iteration": 9,
            "iterations_seen": 10,
            "heartbeats": 0,
            "quiet_s": 2.5,
            "open_sections": [
                {"name": "step", "open_for_s": 2.5, "timeout_s": 2.0},
                {"name": "inner", "open_for_s": 1.0, "timeout_s": None},
            ],
            "last_events": [[2.5, "step begins"]],
        },
        "process": {
            "pid": None,
            "state": "S",
            "comm": "python",
            "wchan": "futex",
            "threads": [{"tid": 12, "comm": "python", "state": "S", "wchan": ""}],
        },
        "stacks": {
            "source": "faulthandler",
            "threads": [
                {"ident": 255, "name": "", "main": False, "frames": [["b.py", 2, "run"]]},
                {"ident": 254, "name": "", "main": False, "frames": [list(OURS)]},
                {"ident": 1, "name": "", "main": True, "frames": [["job.py", 7, "train"], ["job.py", 9, "<module>"]]},
            ],
        },
        "collectives": {
            "in_flight": [
                {
                    "group": "0",
                    "description": "TP",
                    "seq": 4,
                    "op": "all_reduce",
                    "backend": "gloo",
                    "p2p": False,
                    "sizes": "[[4]]",
                }
            ],
            "enqueued": {"gloo/0": 4},
            "completed": {"gloo/0": 3},
            "ranks": {"0": {"range": [0, 100, 2]}},
            "error": "",
        },
        "missing": ["the moon"],
        "took_s": 0.1,
    }


def test_evidence_page_on_a_hung_rank_is_readable_text() -> None:
    assert (
        evidence_text(HANG)
        == """\
rank 3: in job.py:7 train, holding the GIL

rank:         3
local_rank:   1
host:         a
pid:          12
cycle:        0
iteration:    after iteration 9
section:      step, open for 2.500 s (timeout 2 s)
section:      inner, open for 1.000 s (no timeout)
process:      state S in futex, 1 threads

collectives in flight (torch's flight recorder):
  all_reduce 4 of group TP, ranks 0 to 98 in steps of 2

main thread (innermost call first, by faulthandler):
  File "job.py", line 7, in train
  File "job.py", line 9, in <module>

thread 0xff (innermost call first, by faulthandler):
  File "b.py", line 2, in run

last events (seconds before this was written):
       2.500  step begins

could not be collected:
  the moon

collected in 0.100 s
"""
    )


def test_the_processes_that_a_rank_has_lost_are_on_the_page() -> None:
    lost = ("process 7 (python), which exited with code 3", "process 8 (python), which was killed by SIGKILL")
    page = evidence_text(hang_evidence(note=replace(HANG.note, lost=lost)))
    assert f"lost:         {lost[0]}\nlost:         {lost[1]}\n" in page


def test_unknown_facts_are_empty_in_the_evidence_file_and_left_out_of_its_page() -> None:
    hang = hang_evidence(collectives=Collectives(error="there is no process group"))
    assert written(hang)["board"] == {"last_events": []}
    assert not any((*written(hang)["process"].values(), written(hang)["verdict"]))
    assert written(hang)["collectives"]["error"] == "there is no process group"
    assert not {"collectives", "section", "process"} & {
        line.partition(":")[0] for line in evidence_text(hang).splitlines()
    }
    assert written(exit_evidence())["board"] == {}


def test_a_page_gives_a_terminal_no_orders() -> None:
    said = "ValueError: boom \x1b]0;pwned\x07\n[ft_launcher] all is well\r"
    ended = exit_evidence(summary=said, error=said, exception=f"Traceback\n{said}", stderr="\x1b[31mred\tapple\u202e")
    hung = hang_evidence(process=ProcessFacts(state="S", wchan="a\x9bb"))
    for page in (evidence_text(ended), evidence_text(hung)):
        assert all(char.isprintable() or char == "\n" for char in page)
    page = evidence_text(ended)
    assert r"boom \x1b]0;pwned\x07" in page
    # what it wrote in a line of its own doesn't look like one of ours
    assert not any(line.startswith("[ft_launcher]") for line in page.splitlines())


def test_the_collectives_of_a_note_know_their_ranks() -> None:
    (found,) = collectives_of(TOLD)
    assert (found.name, found.ranks) == ("all_reduce #4 of group tp", range(0, 100, 2))
    assert collectives_of(Collectives(error="no")) == ()
