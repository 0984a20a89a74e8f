"""Predicted seconds: a table of rates, and the arithmetic on it. No choice is made by them."""
