"""Reads from a file before and after, looks for another, and makes one."""

import os
import sys
import tempfile

source = open(__file__)  # noqa: SIM115
print(source.readline(), os.lseek(source.fileno(), 0, os.SEEK_CUR) > 0)
low = os.open(__file__, os.O_RDONLY)
print(os.read(low, 10))
directory = tempfile.gettempdir()
print(os.path.exists(os.path.join(directory, "nobody makes this")), sorted(os.listdir(os.path.dirname(__file__)))[:2])
rank = os.environ["RANK"]
print(source.readline(), os.read(low, 10), os.lseek(low, 0, os.SEEK_CUR))
with tempfile.TemporaryFile("w+") as file:
    file.write(rank)
    file.seek(0)
    print(file.read())
sys.exit(3)
