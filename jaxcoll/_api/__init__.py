"""Public in-program functions: axis names and options. Never a device or a mesh."""

from jaxcoll._compat import settings as settings  # it takes our frames out of errors
from jaxcoll._mesh import world as world  # it has the scope of bare calls
