"""Programs that start ranks."""
