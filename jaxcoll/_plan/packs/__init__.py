"""Packs: elements that travel together."""
