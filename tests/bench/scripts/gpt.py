"""examples/train_gpt.py with stamps: ``python gpt.py EXAMPLES [its arguments]``.

The same for every launcher. Those that aren't ours get ``--no-ft``: then its hooks do nothing, but they are called,
and the one at the end of a step is where this stamps.
"""

from __future__ import annotations

import sys
from typing import Any

from stamp import stamp, stamp_imported

if __name__ == "__main__":  # not in the helper below, which has other arguments
    sys.path.insert(0, sys.argv[1])
    import torch.distributed as dist
    import train_gpt

    from megatron_ft import fault_tolerance


def main() -> None:
    """Train, with the modules that are beside train_gpt.py."""
    del sys.argv[1]
    stamp_imported()
    init_process_group, on_training_step_end = dist.init_process_group, fault_tolerance.on_training_step_end
    done = 0

    def init(*args: Any, **options: Any) -> None:
        init_process_group(*args, **options)
        stamp("group")

    def step_end(state: Any) -> None:
        nonlocal done
        on_training_step_end(state)
        done += 1
        stamp("step", done)

    dist.init_process_group, fault_tolerance.on_training_step_end = init, step_end
    train_gpt.main()


# megatron-core starts a helper of its checkpoint writer by spawn, which imports this again
if __name__ == "__main__":
    main()
