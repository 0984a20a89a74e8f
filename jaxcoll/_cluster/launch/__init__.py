"""Processes of this host that form one job, started and surely ended."""
