"""Which elements travel together."""
