"""Exit codes of ``ft_launcher`` that schedulers act on; other commands also use 2."""

from __future__ import annotations

MISTAKE_CODE = 2
"""The command line or the configuration is invalid."""
NO_PROGRESS_CODE = 93
"""Another start would fail like the last ones."""
TRY_AGAIN_CODE = 94
"""Too few nodes are left to continue: the job may be started again at once, on other nodes."""
