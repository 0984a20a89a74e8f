"""Gradients of the global batch's loss."""
