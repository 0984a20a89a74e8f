"""Watches this process's programs while they run: compilations, calls, and one profile."""
