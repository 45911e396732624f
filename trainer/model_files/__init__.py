"""Model folders on disk: their configuration, weights, adapters and digests. No torch."""
