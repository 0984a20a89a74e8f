"""Code that runs in the measured processes. Only `jax_rank` imports jaxcoll and JAX."""
