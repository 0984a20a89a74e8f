"""Reads the equations of traced programs. Computes nothing."""
