"""Wire formats: how the elements of a sum are encoded for the wire and decoded again."""

from jaxcoll._compression import formats as formats  # the import registers them by name
