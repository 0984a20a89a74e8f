"""Hands the texts of a user's program to those who read them; runs nothing."""
