"""A script that ends in another way in each cycle."""

import os
import signal
import sys
import threading


def inner():
    raise ValueError("bad\nvalue")


def chain():
    try:
        inner()
    except ValueError as error:
        raise KeyError("k") from error


def hook(*arguments):
    print("hook", arguments[0], arguments[1], sys.exc_info())


def broken_hook(*_arguments):
    raise RuntimeError("in the hook")


def with_hook(function):
    sys.excepthook = function
    inner()


def in_thread():
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()
    sys.exit(4)


ENDINGS = {
    "text": lambda: sys.exit("a text"),
    "pair": lambda: sys.exit((1, 2)),
    "raise": inner,
    "chain": chain,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "_exit": lambda: os._exit(5),
    "hook": lambda: with_hook(hook),
    "broken hook": lambda: with_hook(broken_hook),
    "thread": in_thread,
    "well": lambda: None,
}

if __name__ == "__main__":
    print("begin")
    sys.stdout.flush()
    # one after the other, a cycle for each
    ENDINGS[list(ENDINGS)[int(os.environ.get("FT_CYCLE", "0"))]]()
    print("end")
