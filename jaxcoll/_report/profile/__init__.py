"""Programs that run: what they compiled, how long collectives took, who was late."""
