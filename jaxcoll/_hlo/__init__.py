"""Reads the HLO text of programs: collectives, matrix products, loops, and lines of Python."""
