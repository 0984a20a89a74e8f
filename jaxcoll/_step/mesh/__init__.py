"""Devices, meshes, shardings, placement, and the facts of a mesh."""
