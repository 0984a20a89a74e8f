"""Shapes, sizes, integers. No arrays, no axis, no device, no clock."""
