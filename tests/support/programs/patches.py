"""Replaces functions of libraries before others import them."""

import collections
import json
import os
import sys
import time

real = json.dumps
json.dumps = lambda value: "patched " + real(value)
sleep, getpid, urandom, stat = time.sleep, os.getpid, os.urandom, os.stat


class Clock:
    sleep = time.sleep
    stat = os.stat


Pair = collections.namedtuple("Pair", "a b")
print(json.dumps([1]), os.stat in os.supports_dir_fd, os.stat in os.supports_follow_symlinks)
rank = os.environ["RANK"]
Clock().sleep(0)
sleep(0)
print(json.dumps([rank]), getpid() == os.getpid(), len(urandom(5)), Pair(1, 2))
print(stat("/") == os.stat("/") == Clock().stat("/"), os.stat in os.supports_dir_fd, repr(os.stat), repr(time.sleep))
print(sys.meta_path)
sys.exit(3)
