"""`megatron-ft node-health`: whether this node is ready for ranks."""
