"""Miles: reinforcement learning for large language models."""
