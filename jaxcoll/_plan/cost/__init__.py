"""The cost model: seconds from bytes, links and counts."""
