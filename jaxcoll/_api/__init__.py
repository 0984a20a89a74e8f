"""Public functions to call inside a mapped program. They take axis names, no devices or meshes."""

from jaxcoll._compat import settings as settings  # removes our frames from tracebacks
from jaxcoll._mesh import world as world  # sets the scope of calls outside `data_parallel`
