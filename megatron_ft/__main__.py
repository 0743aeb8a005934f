"""``python -m megatron_ft``, the same as ``megatron-ft``."""

import sys

from megatron_ft.cli.main import main

sys.exit(main())
