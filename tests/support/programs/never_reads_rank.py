"""Reads nothing of the launcher's, and ends."""

import atexit
import sys
import threading

atexit.register(print, "at exit")
print("works", threading.active_count())
sys.exit("ends with a text")
