"""Reads the texts of programs: HLO, StableHLO, and what stands in them."""
