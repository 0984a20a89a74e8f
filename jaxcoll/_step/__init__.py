"""One function to one compiled program: tracing, out specs, lowering, compiling ahead of time."""
