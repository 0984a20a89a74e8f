"""Compiled programs, deadlines, peers: process groups, the watchdog, fingerprints."""
