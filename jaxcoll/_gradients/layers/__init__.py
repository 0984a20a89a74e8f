"""A scan over layers with sharded parameters."""
