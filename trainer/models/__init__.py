"""Models in memory: loading, adapters, quantization, the loss, greedy answers."""
