"""Layers in a scan whose parameters are in shards."""
