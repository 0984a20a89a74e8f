"""Error feedback: what replicas owe to a sum, and the reductions that take it along."""
