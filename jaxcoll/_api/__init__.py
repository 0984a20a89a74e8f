"""Public in-program functions: axis names and options. Never a device or a mesh."""
