"""Whether replicas hold the same, and whether a sum arrived intact."""
