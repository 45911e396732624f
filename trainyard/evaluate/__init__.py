"""Evaluate models side by side: runs, their base, and models of servers."""
