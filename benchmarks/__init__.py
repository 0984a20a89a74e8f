"""Benchmarks of jaxcoll, each run by one command from a checkout (README.md)."""
