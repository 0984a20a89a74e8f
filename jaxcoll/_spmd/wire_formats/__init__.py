"""Wire formats: what turns the elements of a sum into codes, and back."""
