"""Reads compiled programs and profiles. Changes nothing, runs nothing."""
