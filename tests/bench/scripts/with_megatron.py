"""The bare script, and the imports of a Megatron job. Not called megatron.py: that would hide the package."""

# ruff: noqa: E402

from __future__ import annotations

import warnings

warnings.simplefilter("ignore")
import megatron.core
import megatron.core.models.gpt  # noqa: F401
import steps
from stamp import stamp_imported

if __name__ == "__main__":
    stamp_imported()
    steps.run()
