"""What runs in the measured processes. Without jaxcoll and JAX, but for `jax_rank`."""
