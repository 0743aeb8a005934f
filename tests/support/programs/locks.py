"""Knows its rank in the middle of a lock, of logging, of an exception, and of an import."""

import logging
import os
import sys
import threading

lock = threading.RLock()


class Handler(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), os.environ["RANK"], lock.acquire(blocking=False))


logging.getLogger().addHandler(Handler())
try:
    {}["x"]
except KeyError:
    with lock:
        logging.error("in")
    print(sys.exc_info()[0].__name__)
    logging.error("again")
print(threading.current_thread() is threading.main_thread(), threading.active_count(), threading.enumerate())
sys.exit(3)
