"""`examples/train_gpt.py`, whose saves stand still, half done, until the rank is asked to end by SIGTERM.

python held_save.py [its arguments]
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main() -> None:
    """Train."""
    sys.path.insert(0, str(EXAMPLES))
    import cpu_stand_in

    cpu_stand_in.install()
    import gpt_utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    asked: list[Any] = []
    # megatron-core 0.16 has it with an underscore, 0.17 without.
    public = hasattr(filesystem_async, "get_write_results_queue")
    name = "get_write_results_queue" if public else "_get_write_results_queue"
    begin_to_write = getattr(filesystem_async, name)

    class Noting(gpt_utils.ExitSignal):
        def _on_signal(self, *args: Any) -> None:
            super()._on_signal(*args)
            asked.append(args)

    def hold() -> Any:
        while not asked:
            time.sleep(0.01)
        return begin_to_write()

    gpt_utils.ExitSignal = Noting  # type: ignore[misc]
    setattr(filesystem_async, name, hold)
    sys.argv[0] = str(EXAMPLES / "train_gpt.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
