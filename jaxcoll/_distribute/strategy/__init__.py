"""Strategies, replica contexts, and functions that run on all replicas."""
