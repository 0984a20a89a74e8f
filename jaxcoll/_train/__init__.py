"""Optimizer state in shards, a link for optax, and a test for steps."""

from jaxcoll._mesh import world as world  # it has the scope of bare calls
