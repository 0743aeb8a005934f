"""Caches, generators, context variables and weak references that outlive the point."""

import contextvars
import dataclasses
import functools
import gc
import os
import sys
import weakref

VARIABLE = contextvars.ContextVar("variable", default=0)
VARIABLE.set(5)


@functools.cache
def slow(number):
    print("computes", number)
    return number + 1


def numbers():
    yield 1
    yield os.environ["RANK"]
    yield 3


class Thing:
    def __del__(self):
        print("is deleted")


@dataclasses.dataclass
class Record:
    values: list = dataclasses.field(default_factory=list)


slow(1)
thing = Thing()
reference = weakref.ref(thing)
print(list(numbers()), slow(1), slow(2), VARIABLE.get(), dataclasses.asdict(Record([1])))
del thing
print(reference(), gc.isenabled(), gc.get_threshold())
sys.exit(3)
