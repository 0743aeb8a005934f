"""Leaves objects in cycles, which Python takes down at its end."""

import os
import sys


class Thing:
    def __init__(self):
        self.me = self

    def __del__(self, write=os.write):
        write(1, b"is deleted\n")


before = Thing()
rank = os.environ["RANK"]
after = Thing()
sys.exit(3)
