"""What a run costs: memory, bytes and operations. Strategies build their cost models on it. Importable without torch."""
