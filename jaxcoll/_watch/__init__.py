"""Watches the programs of this process while they run: compilations, calls, and one profile."""
