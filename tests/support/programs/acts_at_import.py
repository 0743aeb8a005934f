"""Imports modules that read RANK, run a program with it, and start a thread while they are imported."""

import os
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts"))
print("before")
import asks_shell  # noqa: E402, F401
import reads_rank  # noqa: E402
import starts_thread  # noqa: E402

print(reads_rank.RANK, reads_rank.SEEN, os.environ["RANK"])
print(starts_thread.answer(), threading.active_count(), starts_thread.thread.is_alive())
starts_thread.stop()
print(threading.active_count(), threading.main_thread().native_id == os.getpid())
sys.exit(3)
