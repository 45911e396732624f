"""Rewards of completions: files of the user in a process with limits, and built-in ones."""
