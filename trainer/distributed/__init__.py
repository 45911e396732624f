"""Process groups, replicas and the distribution of rows over ranks."""

SHARED_GPUS = "TRAINYARD_SHARED_GPUS"  # 1 if ranks of several hosts, which are one machine, use the same GPU
