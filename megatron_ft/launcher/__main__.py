"""``python -m megatron_ft.launcher``, the same as ``ft_launcher``."""

import sys

from megatron_ft.launcher.main import main

sys.exit(main())
