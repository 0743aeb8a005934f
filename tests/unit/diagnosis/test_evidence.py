"""The evidence on one rank: what its file holds, and the page that people read."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective, Collectives
from megatron_ft.diagnosis.evidence import OpenSection, RankEvidence, evidence_text, open_sections
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.diagnosis.stacks import REPORTER_THREAD, Frame, ThreadStack
from megatron_ft.link.base.layout import ArmedTimeout, SectionView
from megatron_ft.link.base.process_facts import ProcessFacts, ThreadFacts
from tests.fuzz.healthy import BOARD
from tests.support.agents import hung


def hang_evidence(**known: Any) -> RankEvidence:
    note = RankSnapshot(rank=3, host="a", pid=12)
    return RankEvidence(**{"summary": "rank 3: does not answer", "note": note, "cycle": 0, "took_s": 0.1, **known})


def exit_evidence(**known: Any) -> RankEvidence:
    note = RankSnapshot(rank=3, host="a", pid=12, gone=True, exitcode=1, raised=known.pop("error", ""))
    summary = "rank 3 exited with code 1"
    return RankEvidence(**{"summary": summary, "note": note, "cycle": 0, "took_s": 0.1, **known})


S = 1_000_000_000

ENTERED = Collective(group="0", description="TP", seq=4, op="all_reduce", backend="gloo", ranks=tuple(range(0, 100, 2)))
OURS = Frame("/x/megatron_ft/rank/crash_reporter/reporter.py", 9, REPORTER_THREAD)
HANG = hang_evidence(
    summary="rank 3: in job.py:7 train, holding the GIL",
    note=RankSnapshot(
        rank=3, local_rank=1, host="a", pid=12, iteration=9, frame="job.py:7 train", has_stack=True, lost=("a", "b")
    ),
    verdict=hung(rank=3, elapsed_s=2.5, timeout_s=2.0, open_sections=("step", "inner")),
    open_sections=(
        OpenSection(name="step", open_s=2.5, timeout_s=2.0),
        OpenSection(name="inner", open_s=1.0, timeout_s=None),
    ),
    last_events=((2.5, "step begins"),),
    process=ProcessFacts(
        state="S", comm="python", wchan="futex", threads=(ThreadFacts(tid=12, comm="python", state="S", wchan=""),)
    ),
    stacks_by="faulthandler",
    threads=(
        ThreadStack(255, (Frame("b.py", 2, "run"),)),
        ThreadStack(254, (OURS,)),
        ThreadStack(1, (Frame("job.py", 7, "train"), Frame("job.py", 9, "<module>")), main=True),
    ),
    collectives=Collectives(in_flight=(ENTERED,), enqueued={"gloo/0": 4}, completed={"gloo/0": 3}),
    missing=("the moon",),
)


def written(evidence: RankEvidence) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(evidence.packed()))
    return found


def test_learned_timeout_that_only_reports_is_shown_as_such() -> None:
    view = SectionView("step", 3 * S, 1, None, armed=ArmedTimeout(2 * S, enforced=False))
    board = BOARD._replace(sections=(view,))
    assert "step, open for 1.000 s (timeout 2 s, only reported)" in evidence_text(
        replace(HANG, open_sections=open_sections(board, 4 * S))
    )


def test_evidence_file_on_a_hung_rank_has_all_fields() -> None:
    found = written(HANG)
    assert (found["schema"], found["summary"], found["rank"], found["local_rank"]) == (2, HANG.summary, 3, 1)
    assert (found["verdict"]["section"], found["verdict"]["elapsed_s"]) == ("step", 2.5)
    assert found["open_sections"][1] == {"name": "inner", "open_s": 1.0, "timeout_s": None, "enforced": True}
    assert found["last_events"] == [[2.5, "step begins"]]
    assert found["process"]["threads"] == [{"tid": 12, "comm": "python", "state": "S", "wchan": ""}]
    assert found["threads"][0] == {"ident": 255, "name": "", "main": False, "frames": [["b.py", 2, "run"]]}
    (entered,) = found["collectives"]["in_flight"]
    assert (entered["op"], entered["ranks"]) == ("all_reduce", {"range": [0, 99, 2]})
    assert found.keys() == {*written(hang_evidence()), "local_rank", "iteration", "has_stack", "frame", "lost"}


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
lost:         a
lost:         b
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


def test_page_on_an_exit_tells_it_and_leaves_unknown_facts_out() -> None:
    page = evidence_text(exit_evidence(error="ValueError: no", stderr="last line"))
    assert "exit:         code 1\nerror:        ValueError: no\n" in page
    assert "stderr:\n  last line\n" in page
    assert not any(name in page for name in ("section", "process", "collectives", "iteration"))
    assert "collectives" not in evidence_text(hang_evidence(collectives=Collectives(error="no process group")))


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
