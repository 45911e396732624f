"""Distillation from a teacher model while a run trains: the loss, the teacher in a rank or on a separate host."""
