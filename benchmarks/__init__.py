"""Benchmarks of jaxcoll; each is one command, run from a checkout (README.md)."""
