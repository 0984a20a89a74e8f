"""Start the processes of one job on this host, and make sure that they end."""
