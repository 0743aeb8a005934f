"""What `examples/train_gpt.py` imports; ``megatron_on_cpu`` imports it once for many ranks."""

import megatron.core.dist_checkpointing.strategies.async_utils
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.optimizer_param_scheduler
import megatron.core.pipeline_parallel  # noqa: F401
