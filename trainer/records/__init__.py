"""What a rank writes to its run folder: heartbeats, metrics, checkpoints."""
