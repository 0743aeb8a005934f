"""`megatron-ft slurm`: the body of a batch script."""
