"""Fails before it knows its rank, with a chain of exceptions."""

import atexit

atexit.register(print, "at exit")


def inner():
    raise ValueError("bad\nvalue")


try:
    inner()
except ValueError as error:
    raise KeyError("k") from error
