"""Optimizer state in shards, a link for optax, and a test for steps."""

from jaxcoll._compat import settings as settings  # it takes our frames out of errors
from jaxcoll._mesh import world as world  # it has the scope of bare calls
