"""Shows how it was started."""

import os
import sys

print(sys.argv, sys.orig_argv[1:], sys.path[0], sys.flags, sys.warnoptions, __name__, __file__, __spec__)
print(sorted(name for name in globals() if name.startswith("__")), os.getcwd(), sys._getframe().f_back)
print(os.path.basename(sys.executable), sys.path[1:], "sitecustomize" in sys.modules, os.environ.get("PYTHONPATH"))
print(os.environ["RANK"], sys.orig_argv[1:], open("/proc/self/cmdline").read().split("\0")[1:])  # noqa: SIM115
sys.exit(3)
