"""Work on the results of runs without training: merging and evaluation."""
