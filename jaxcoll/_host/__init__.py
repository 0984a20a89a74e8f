"""Devices, meshes, processes, compilation. Never spells a collective."""
