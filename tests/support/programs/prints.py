"""Writes to both streams, in every way there is, before and after."""

import ctypes
import os
import subprocess
import sys

print("one", end="")
sys.stdout.buffer.write(b" two\n")
os.write(1, b"three\n")
os.write(2, b"to standard error\n")
sys.stderr.write("more of it\n")
buffered = open(1, "w", closefd=False)  # noqa: SIM115
buffered.write("buffered\n")
ctypes.CDLL(None).puts(b"of a C library")
print(sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stdin.read())
print(os.environ["RANK"], file=sys.stderr)
subprocess.run(["echo", "of a program"], check=True)
buffered.flush()
sys.exit(3)
