"""Which process of a program that hangs did not arrive, and where it is."""
