"""Logs with the number of its process."""

import logging
import os
import sys

logging.basicConfig(format="%(process)d %(message)s", stream=sys.stdout)
logging.warning("%d", os.getpid())
records = []
logging.getLogger().addFilter(lambda record: records.append(record.process == os.getpid()))
logging.warning("x")
print(records)
sys.exit(3)
