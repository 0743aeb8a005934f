"""The steps of the bare script, with the imports of a Megatron job."""

# ruff: noqa: E402

from __future__ import annotations

import warnings

warnings.simplefilter("ignore")
import megatron.core
import megatron.core.models.gpt  # noqa: F401
from steps import main

if __name__ == "__main__":
    main()
