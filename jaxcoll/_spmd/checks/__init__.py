"""Checks that replicas hold the same."""
