"""Process groups, replicas and the distribution of rows over ranks."""

SHARED_GPUS = "TRAINYARD_SHARED_GPUS"  # 1 if ranks of several hosts, which are one machine, use the same GPU
SPARE_LAYERS = "TRAINYARD_SPARE_LAYERS"  # 1 if the ranks of a pipeline also keep the layers of their neighbours on disk
TEACHER_ADDRESS = "TRAINYARD_TEACHER"  # ADDRESS:PORT of the teacher on another host
TEACHER_TOKEN = "TRAINYARD_TEACHER_TOKEN"  # the secret with which ranks and teacher authenticate each other
