"""Wire formats: values that turn the elements of a sum into codes, and back."""
