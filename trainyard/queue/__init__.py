"""The queue: Slurm leases hosts to runs."""
