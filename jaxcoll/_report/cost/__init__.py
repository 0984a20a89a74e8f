"""Predicted seconds: a table of rates, and arithmetic on it. No decision depends on them."""
