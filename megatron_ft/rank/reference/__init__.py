"""The names of nvidia-resiliency-ext in a rank: who imports them there gets this package."""
