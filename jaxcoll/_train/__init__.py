"""Optimizer state in shards, a link for optax, and a test for steps."""
