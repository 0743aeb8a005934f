"""A launcher's side of the control plane: where the job meets, and how this launcher talks to its coordinator."""
