"""Wire formats: values that turn the elements of a sum into codes, and back."""

from jaxcoll._wire import formats as formats  # which are known by their names
