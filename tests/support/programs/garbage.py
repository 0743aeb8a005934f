"""Leaves garbage that knows its rank when it is collected."""

import gc
import os
import sys


class Thing:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("is deleted in", os.environ.get("RANK"))


thing = Thing()
del thing
rank = os.environ["RANK"]
gc.collect()
print("is", rank)
sys.exit(3)
