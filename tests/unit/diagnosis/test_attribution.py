"""Classes of failures by their first errors, on texts from public issues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatron_ft.diagnosis.attribution import attribute, telling_kernel_lines
from megatron_ft.launcher.processes.crash_evidence import gpu_of
from megatron_ft.link.facts.launcher import FailureClass

LEAST_RIGHT, MOST_WRONG = 0.9, 0.02
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=77, name=python"


def class_of(text: str) -> str:
    # a line of the kernel reaches `attribute` as such
    found = attribute("", [text]) if "NVRM" in text else attribute(text)
    return "unknown" if found is None else found.kind.value


@pytest.mark.parametrize("file", ["failures.yaml", "later_failures.yaml", "unseen_failures.yaml"])
def test_failures_of_public_issues_get_the_class_that_a_person_gave_them(file: str) -> None:
    labelled = yaml.safe_load((Path(__file__).parent / file).read_text())
    failures = [(label, each["issue"], each["text"]) for label, group in labelled.items() for each in group]
    assert len(failures) >= 60
    missed = [(label, class_of(text), issue, text) for label, issue, text in failures if class_of(text) != label]
    assert len(missed) <= (1 - LEAST_RIGHT) * len(failures), "\n".join(map(str, missed))
    wrong = [each for each in missed if each[1] != "unknown"]
    assert len(wrong) <= MOST_WRONG * len(failures), "\n".join(map(str, wrong))
    for label in ("workload", "hardware", "network", "storage", "cascade", "unknown"):
        of_it = [text for kind, _, text in failures if kind == label]
        assert sum(class_of(text) == label for text in of_it) >= LEAST_RIGHT * len(of_it) - 1, label


@pytest.mark.parametrize(
    "text",
    [
        *("", "RuntimeError: it broke", "MyError: 28", "exit", "RuntimeError: value 5 is late"),
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: the tracker's queue has an entry nanoseconds old",
    ],
)
def test_error_that_no_sign_fits_has_no_class(text: str) -> None:
    assert attribute(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)", "shared memory too small"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/vocab.bin'", ""),
        ("FileNotFoundError: [Errno 2] Unable to synchronously open file (unable to open file: name = 'a.h5')", ""),
        ("RuntimeError: this dtype is not supported by this GPU hardware", "invalid kernel"),
        ("OutOfResources: out of resource: shared memory, Required: 163840", "kernel too large for the GPU"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0", "host out of memory"),
        ("ExceptionGroup: unhandled (2 sub-exceptions): KeyError: 'lr'", ""),
    ],
)
def test_workloads_errors_that_read_like_another_class_stay_the_workloads(text: str, found: str) -> None:
    told = attribute(text)
    assert told is not None
    assert (told.kind, told.sign) == (FailureClass.WORKLOAD, found)


@pytest.mark.parametrize(
    ("error", "xids", "found"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", (79,), "hardware: Xid 79"),
        ("RuntimeError: it broke", (79,), "hardware: Xid 79"),
        ("ValueError: unknown option --lr-decay", (79,), "workload: Xid 79"),
        ("OSError: [Errno 28] No space left on device", (13,), "storage: disk full; also Xid 13"),
        ("ValueError: unknown option --lr-decay", (63,), "workload"),
        ("", (45, 63, 92), "None"),
        ("", (31, 79), "hardware: Xid 79"),  # the device counts more than a kernel
    ],
)
def test_xid_counts_beside_an_error_of_the_program_and_never_instead_of_it(
    error: str, xids: Sequence[int], found: str
) -> None:
    assert str(attribute(error, [XID.format(xid) for xid in xids])) == found


def test_process_that_the_kernel_killed_for_memory_is_the_workloads() -> None:
    line = "Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB"
    assert str(attribute("", [line], pid=4711)) == "workload: host out of memory, killed by the kernel"
    assert attribute("", [line], pid=4712) is None


def test_kernel_lines_count_for_the_ranks_own_gpu_or_process_in_its_last_minutes() -> None:
    def told(*lines: str, since_us: int = 0, until_us: int = 400_000_000, gpu: str = "0000:3b:00") -> int:
        records = [f"6,1,{us},-;{line}" for us in (50_000_000, 200_000_000) for line in lines]
        found = telling_kernel_lines(records, since_us=since_us, until_us=until_us, pid=77, gpu=gpu)
        assert set(found) <= set(lines)
        return len(found)

    own, others = XID.format(79), XID.format(79).replace("3b", "99").replace("pid=77", "pid=9")
    killed = "Memory cgroup out of memory: Killed process 77 (python)"
    assert told(own) == told(killed) == 1  # the older ones are from six minutes before the end
    assert told(own, until_us=300_000_000) == 2
    assert told(own, since_us=300_000_000) == told(others) == told("eth0: link is up") == 0
    assert told(own, gpu="") == 1, "by its process, where the GPU isn't known"
    assert told("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus") == 1
    assert told("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", gpu="") == 0
    assert telling_kernel_lines(["no record"], since_us=0, until_us=1, pid=1, gpu="") == ()


@pytest.mark.parametrize(
    ("visible", "local_rank", "found"),
    [(None, 1, "0000:4b:00"), ("1,0", 0, "0000:4b:00"), ("GPU-1f", 0, ""), ("7", 0, ""), (None, 2, ""), ("", 0, "")],
)
def test_address_of_a_ranks_gpu_follows_the_visible_devices(visible: str | None, local_rank: int, found: str) -> None:
    assert gpu_of(["0000:3b:00", "0000:4b:00"], visible, local_rank) == found
