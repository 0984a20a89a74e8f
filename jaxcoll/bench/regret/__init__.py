"""How much slower the automatic choice is than the best one made by hand."""
