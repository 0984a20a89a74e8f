"""Public in-program functions: axis names and options. Never a device or a mesh."""

from jaxcoll._mesh import world as world  # it has the scope of bare calls
