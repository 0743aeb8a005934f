"""What the files of a process hold, however it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron_ft.cli.logs.read import read_directory
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import StateFile
from megatron_ft.link.facts.shared import Warning_
from megatron_ft.link.file_queue import FileQueue

WRITER = """
import sys
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import StateFile
path = sys.argv[1]
print("ready", flush=True)
for number in range(10**9):
    carry_out(StateFile(path, {"number": number, "padding": "x" * 200_000, "again": number}))
"""


def test_killing_the_writer_at_any_moment_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = str(tmp_path / "ft_state.json")
    seed = random.SystemRandom().randrange(1 << 32)
    moments = random.Random(seed)
    carry_out(StateFile(path, {"number": -1, "padding": "x" * 200_000, "again": -1}))
    seen = set()
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        document = json.loads(Path(path).read_text())
        assert document["number"] == document["again"], f"seed {seed}"
        assert len(document["padding"]) == 200_000, f"seed {seed}"
        seen.add(document["number"])
    assert len(seen) > 1, "no writer was killed after a write: nothing was tested"


def test_a_process_that_ends_without_a_word_has_written_all(tmp_path: Path) -> None:
    script = (
        "import sys; from megatron_ft.records.event_log import EventLog\n"
        "from megatron_ft.link.facts.shared import Warning_\n"
        "log = EventLog.open(sys.argv[1], role='rank', run_id='x')\n"
        "for number in range(3000): log.write(Warning_(text=str(number)))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    records = [entry.record for log in read_directory(tmp_path) for entry in log.entries]
    assert [int(each.text) for each in records if isinstance(each, Warning_)] == list(range(3000))


def test_a_fork_has_no_thread_and_waits_for_none() -> None:
    files, answers = FileQueue(), threading.Event()
    files.do(lambda: answers.wait(60))
    with files._changed:  # as it may be at any moment in a process that has several threads
        pid = os.fork()
        if pid == 0:
            os._exit(0 if files.do(lambda: None) and files.finish(60) else 1)
    answers.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
