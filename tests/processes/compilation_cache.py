"""A process of a world whose programs are in JAX's persistent compilation cache after a first run."""

import logging
import sys

import jax
import numpy as np

import jaxcoll as jc

jc.initialize()
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
logging.basicConfig(stream=sys.stdout)  # JAX says at this level what it found, and by which key
logging.getLogger("jax._src.compiler").setLevel("DEBUG")


@jc.data_parallel
def step(w, x):
    _, grads = jc.value_and_grad(lambda w, x: sum((x.mean() * a).sum() for a in w), "data")(w, x)
    return [a - g for a, g in zip(w, grads, strict=True)]


w = step([np.full(k + 2, 3, "f") for k in range(6)], np.full(2, 1 + jax.process_index(), "f"))
print("VALUES", *[np.asarray(a.addressable_data(0)).tolist() for a in w])
