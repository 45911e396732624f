"""The training loop: its inputs, its steps, its results; and training scripts of users."""
