"""Cross-device ops: reductions, broadcasts and gathers between programs."""
