"""Hosts on a slow network, all of them on this machine."""
