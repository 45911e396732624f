"""Process groups, replicas and the distribution of rows over ranks."""

SHARED_GPUS = "TRAINYARD_SHARED_GPUS"  # 1 if ranks of several hosts, which are one machine, use the same GPU
COPY_STAGES = "TRAINYARD_COPY_STAGES"  # 1 if every host of a pipeline sends its stages of a checkpoint to the next host
