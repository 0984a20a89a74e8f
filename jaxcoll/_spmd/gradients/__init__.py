"""Gradients of the loss of the whole batch."""
