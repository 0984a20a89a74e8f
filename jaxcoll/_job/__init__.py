"""Processes, addresses, sockets, the environment, the coordinator. Never an array."""
