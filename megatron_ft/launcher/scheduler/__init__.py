"""Facts from Slurm or Kubernetes in environment variables, and the options they set."""
