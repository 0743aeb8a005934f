"""What the example imports, for ``forked_script``; imported by its server only."""

import megatron.core.dist_checkpointing.strategies.async_utils
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.optimizer_param_scheduler
import megatron.core.pipeline_parallel  # noqa: F401
