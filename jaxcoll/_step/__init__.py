"""From a function to a compiled program: tracing, out specs, lowering, compiling ahead of time."""
