"""Moves its streams, as tools do that collect what C code prints, and ignores the end of its children."""

import os
import signal
import sys

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
saved = os.dup(1)
os.dup2(2, 1)
print("to standard error")
os.write(saved, b"to standard output\n")
rank = os.environ["RANK"]
print("still to standard error", signal.getsignal(signal.SIGCHLD))
os.write(saved, b"still to standard output\n")
os.dup2(saved, 1)
print("back")
sys.exit(3)
