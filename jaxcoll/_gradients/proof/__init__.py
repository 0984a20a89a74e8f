"""Reads the equations of traced programs (jaxprs). Computes nothing."""
