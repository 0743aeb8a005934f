"""What Slurm or Kubernetes tells this launcher in environment variables, and which options that sets."""
