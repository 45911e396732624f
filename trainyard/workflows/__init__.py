"""What the commands do with runs and Ollama servers together: above the packages queue, ollama and run."""
