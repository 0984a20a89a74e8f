"""The clock, the terminal, files."""
