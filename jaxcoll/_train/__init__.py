"""Sharded parameters and optimizer state, an optax transformation, and a test for steps."""
