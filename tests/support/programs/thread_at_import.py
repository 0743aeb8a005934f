"""Imports a module that starts a thread, and one more that waits in it."""

import os
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parts"))
print("before")
import starts_thread  # noqa: E402

print(starts_thread.answer(), threading.active_count(), starts_thread.thread.is_alive())
starts_thread.stop()
print(os.environ["RANK"], threading.active_count(), threading.main_thread().native_id == os.getpid())
sys.exit(3)
