"""Sharded parameters and optimizer state, an optax transformation, and a test for steps."""

from jaxcoll._compat import settings as settings  # removes our frames from tracebacks
from jaxcoll._mesh import world as world  # sets the scope of calls outside `data_parallel`
