"""Training that continues when workers die: membership, replicated state, checkpoints."""
