"""Training that goes on when workers die: membership, replicated state, checkpoints."""
