"""Sets logging up at its beginning, and logs to a file, too."""

import logging
import os
import sys
import tempfile

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
logging.info("before")
handler = logging.FileHandler(os.path.join(tempfile.gettempdir(), f"{os.path.basename(sys.argv[0])}.log"), mode="w")
logging.getLogger().addHandler(handler)
logging.warning("rank %s", os.environ["RANK"])
logging.getLogger("other").error("after")
print(open(handler.baseFilename).read(), end="")  # noqa: SIM115
os.remove(handler.baseFilename)
sys.exit(3)
