"""nvidia-resiliency-ext's names in a rank, served by this package."""
