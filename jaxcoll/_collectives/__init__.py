"""Code that runs under tracing: it knows axis names, but no device, mesh or compilation."""
