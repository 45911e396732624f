"""Programs that start ranks, and the server of a teacher model."""
