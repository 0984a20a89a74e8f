"""Tracers and axis names. Never a device, a mesh, or a compilation."""
