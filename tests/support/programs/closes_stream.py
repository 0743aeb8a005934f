"""Closes its standard output."""

import os
import sys

os.close(1)
rank = os.environ["RANK"]
low = os.open(__file__, os.O_RDONLY)
print(rank, low, os.read(low, 10), file=sys.stderr)
os.close(low)
sys.exit(3)
