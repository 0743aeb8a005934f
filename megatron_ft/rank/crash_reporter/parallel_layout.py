"""How megatron-core has divided the ranks. Looked up, never imported: if the script hasn't, there is no layout."""

from __future__ import annotations

import sys

__all__ = ["current_layout"]

_KINDS = {
    "tensor": "get_tensor_model_parallel_world_size",
    "pipeline": "get_pipeline_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "data": "get_data_parallel_world_size",
}


def current_layout() -> dict[str, int] | None:
    """Sizes of the parallel groups by kind ("tensor": 2); None while megatron-core's groups don't exist."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    try:
        if parallel_state is None or not parallel_state.model_parallel_is_initialized():
            return None
        return {kind: int(getattr(parallel_state, function)()) for kind, function in _KINDS.items()}
    except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError):
        return None  # a version that names or divides them otherwise; the layout is only told, nothing hangs on it
