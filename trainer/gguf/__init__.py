"""Models as GGUF files without torch, for the deployment of a finished run to Ollama."""
