"""``make demo``: the main job, as a newcomer sees it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT, clean_environment

SMALL = ["--micro-batch-size=2", "--global-batch-size=4", "--hidden-size=32", "--seq-length=16", "--vocab-size=32"]
SHORT = ["--train-iters=44", "--eval-interval=0"]  # some steps are left after the hang, also in a busy machine


@pytest.mark.timeout(300)
def test_the_job_loses_two_ranks_and_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py", "--out", str(tmp_path / "out"), "--async-save", *SMALL, *SHORT],
        cwd=ROOT,
        env={**clean_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    killed = "rank 1 killed by SIGKILL (not sent by ft_launcher) after iteration 25"
    assert f"cycle 0 ended: {killed}; restarting as cycle 1" in said
    assert re.search(r"cycle 1 ended: rank 0 hung in 'step' for 3\.\d s \(timeout 3\.0 s, process stopped\)", said)
    from_memory = r"restored iteration \d+ from memory(?:, newer than the \d+ on disk)?, \d+ iterations? redone"
    restored = re.findall(from_memory, said)
    explained = re.findall(r"cycle \d restores nothing from memory: ", said)  # on a machine with too much to do
    # there, too, the file may be as new as the newest snapshot of all ranks: the cycle begins with the file's iteration
    (log,) = (tmp_path / "out" / "disturbed" / "logs").glob("launcher-*.jsonl")
    begun = [json.loads(line) for line in log.read_text().splitlines() if '"first_iteration"' in line]
    from_file = {event["cycle"] for event in begun if event["cycle"] and event["iteration"] % 10 == 0}
    assert restored or from_file
    assert 2 - len(from_file) <= len(restored) + len(explained) <= 2
    assert "all ranks finished after 3 cycles" in said
    table = [line for line in said.splitlines() if line.startswith("│")]
    rows = [cell for line in table if (cell := line.split("│")[1].strip())]
    assert rows[:5] == ["0", "1", "2", "0 to 1", "1 to 2"]
    phases = [line for line in table if re.match(r"│ \d to \d ", line)]
    assert "in train_gpt.py:" in said  # where it hung
    assert len(phases) == 2
    assert all(cell.strip() not in ("", "-") for line in phases for cell in line.strip("│").split("│"))
    hashes = re.findall(r"^  with(?:out a fault|  ?the faults) +([0-9a-f]{64})$", said, re.MULTILINE)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    # Python's multiprocessing, in a rank that was killed in the middle, leaves an empty pymp-* folder to nobody, and
    # who imports Megatron makes torch's cache of compiled code, empty, too
    assert [name for name in os.listdir(tmp_path) if not name.startswith(("pymp-", "torchinductor_"))] == ["out"]
