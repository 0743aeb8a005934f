"""Logs with a formatter of its own, which writes the number of the process."""

import logging
import os
import sys


class Formatter(logging.Formatter):
    def format(self, record):
        return f"{record.process} {record.getMessage()}"


handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Formatter())
logging.getLogger().addHandler(handler)
logging.warning("%d", os.getpid())
sys.exit(3)
