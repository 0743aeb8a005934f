"""Classes of failures by their first errors, on texts from public issues."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_ft.core.diagnosis.attribution import attribute, telling_kernel_lines
from megatron_ft.core.diagnosis.cycle_cause import find_cause
from megatron_ft.core.facts.launcher import RankExited

LABELLED = yaml.safe_load((Path(__file__).parent / "failures.yaml").read_text())
FAILURES = [(label, each["issue"], each["text"]) for label, group in LABELLED.items() for each in group]
LEAST_RIGHT = 0.9
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=77, name=python"


def class_of(text: str) -> str:
    # a line of the kernel reaches `attribute` as such
    found = attribute("", [text]) if "NVRM" in text else attribute(text)
    return "unknown" if found is None else found.kind.value


def test_failures_of_public_issues_get_the_class_that_a_person_gave_them() -> None:
    assert len(FAILURES) >= 60
    wrong = [(label, class_of(text), issue, text) for label, issue, text in FAILURES if class_of(text) != label]
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(FAILURES), "\n".join(map(str, wrong))
    for label in ("workload", "hardware", "network", "storage", "cascade", "unknown"):
        of_it = [text for kind, _, text in FAILURES if kind == label]
        assert sum(class_of(text) == label for text in of_it) >= LEAST_RIGHT * len(of_it) - 1, label


@pytest.mark.parametrize("text", ["", "RuntimeError: it broke", "MyError: 28", "exit", "RuntimeError: value 5 is late"])
def test_error_that_no_sign_fits_has_no_class(text: str) -> None:
    assert attribute(text) is None


def test_xid_of_the_device_counts_more_than_the_ranks_exception() -> None:
    found = attribute("RuntimeError: CUDA error: an illegal memory access was encountered", [XID.format(79)])
    assert str(found) == "hardware: Xid 79"


def test_xid_that_only_follows_has_no_class() -> None:
    assert attribute("", [XID.format(45)]) is None
    assert str(attribute("", [XID.format(45), XID.format(31)])) == "workload: Xid 31"


def test_process_that_the_kernel_killed_for_memory_is_the_workloads() -> None:
    line = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"
    assert str(attribute("", [line], pid=4711)) == "workload: host out of memory, killed by the kernel"
    assert attribute("", [line], pid=4712) is None


def test_kernel_lines_from_before_the_rank_are_left_out() -> None:
    records = [f"6,1,{us},-;{XID.format(us)}" for us in (10, 20, 30)] + ["6,1,40,-;eth0: link is up", "no record"]
    assert telling_kernel_lines(records, since_us=20) == (XID.format(20), XID.format(30))


def test_cause_line_ends_with_the_class() -> None:
    exits = [RankExited(rank=3, cycle=0, exitcode=1, error="OSError: [Errno 28] No space left on device", at_ns=1)]
    cause = find_cause(exits, [])
    assert cause is not None
    assert cause.line.endswith("No space left on device (storage: disk full)")
