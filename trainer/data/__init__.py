"""Datasets: reading samples, encoding them as tokens, packing them into rows, and the order of the rows. No torch."""
