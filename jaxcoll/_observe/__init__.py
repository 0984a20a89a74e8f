"""Reads text and numbers that others produced. Changes nothing, runs nothing."""
