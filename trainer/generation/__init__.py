"""Servers that generate text: the client of Ollama, the pool that keeps servers busy, and the rollout workers of GRPO."""
