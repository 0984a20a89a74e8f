"""Compiles the programs of the golden texts beside it, also for machines that are not there.

    python make.py cpu:8        with any JAX
    python make.py gpu:1x1x8    with jax==0.12.0.1 jax-cuda13-pjrt==0.12.0.1; no GPU is needed
    python make.py v6e:2x4      with jax==0.12.0.1 libtpu==0.0.51; no TPU is needed
    python make.py cpu:8 packs  only the programs that are named

Figures in test_golden.py belong to the texts as they are: new versions get new files.
"""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 } device_description_str: "NVIDIA H100"
"""


def varying(x):
    return lax.pcast(x, "d", to="varying")


def kinds(x):
    gathered = lax.all_gather(x, "d", tiled=True)
    scattered = lax.psum_scatter(gathered * 2.0, "d", tiled=True)
    exchanged = lax.all_to_all(scattered, "d", 0, 0, tiled=True)
    return lax.ppermute(exchanged, "d", [(i, (i + 1) % 8) for i in range(8)])


def loop(x):
    x, _ = lax.scan(lambda c, _: (varying(jnp.tanh(lax.psum(c, "d"))), None), x, None, length=5)
    return lax.psum(x, "d")


def branches(x):
    some = lax.psum(jnp.sum(x), "d") > 0
    return lax.cond(
        some,
        lambda x: lax.psum(x, "d"),
        lambda x: lax.psum(x * 2.0, "d") + lax.psum(jnp.sin(x), "d"),
        x,
    )


def mesh(x):
    return lax.psum(x, "a"), lax.psum(x * 2.0, "b"), lax.psum(x * 3.0, ("a", "b"))


def variadic(x, y, z):
    return lax.psum((x, y, z), "d")


def overlapped(x, w):
    x = lax.psum_scatter(x, "d", tiled=True)
    w = jnp.tanh(w @ w)
    return lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]), jnp.tanh(w @ w)


def layers(x, w):
    sums = []
    for _ in range(2):
        x = jnp.tanh(x @ w)
        sums.append(lax.psum(x, "d"))
    return sums


def packs(*tree):
    options = jc.CommunicationOptions(bytes_per_pack=1024)
    return jc.all_reduce("sum", tree, "d", options=options)


P = PartitionSpec
F32, I32 = jnp.float32, jnp.int32
PROGRAMS = {  # name: (function, shapes, in_specs, out_specs)
    "kinds": (kinds, [((64, 16), F32)], (P("d"),), P("d")),
    "loop": (loop, [((8, 256), F32)], (P("d"),), P()),
    "branches": (branches, [((8, 64), F32)], (P("d"),), P()),
    "mesh": (mesh, [((8, 32), F32)], (P(("a", "b")),), (P("b"), P("a"), P())),
    "variadic": (variadic, [((8, 100), F32), ((8, 3, 5), F32), ((8, 7), I32)], (P("d"),) * 3, P()),
    "overlapped": (
        overlapped,
        [((8 * 4096, 512), F32), ((2048, 2048), F32)],
        (P("d"), P()),
        (P("d"), P()),
    ),
    "layers": (layers, [((8 * 2048, 2048), F32), ((2048, 2048), F32)], (P("d"), P()), P()),
    "packs": (packs, [((8, 200), F32)] * 3 + [((8, 7), F32)], (P("d"),) * 4, P()),
}
ONLY = {"overlapped": "gpu", "layers": "v6e"}
OPTIONS = {  # what makes v6e start its sums early
    "xla_jf_crs_combiner_threshold_in_bytes": 1,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
}


def devices(where):
    backend, _, size = where.partition(":")
    if backend == "cpu":
        return jax.devices()
    if backend == "gpu":
        described = {"topology": size, "target_config": H100}
        return topologies.get_topology_desc("h100", platform="cuda", **described).devices
    return topologies.get_topology_desc(where, platform="tpu").devices


def trimmed(text):
    """Without the tables of source lines, and without most of what backends note for themselves."""
    text = re.sub(r"(?ms)^FileNames.*?\n\n\n", "", text)
    kept = r"known_trip_count|is_sync"
    return re.sub(rf"(?m), backend_config=(?!.*(?:{kept})).*$", "", text)


def main(where, *chosen):
    line = np.array(devices(where), dtype=object)
    here = Path(__file__).parent
    backend = where.partition(":")[0]
    for name, (function, shapes, in_specs, out_specs) in PROGRAMS.items():
        if ONLY.get(name, backend) != backend or name not in (chosen or PROGRAMS):
            continue
        grid = Mesh(line.reshape(2, 4), ("a", "b")) if name == "mesh" else Mesh(line, ("d",))
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(grid, spec))
            for (shape, dtype), spec in zip(shapes, in_specs, strict=True)
        ]
        mapped = jax.shard_map(function, mesh=grid, in_specs=in_specs, out_specs=out_specs)
        lowered = jax.jit(mapped).lower(*arguments)
        compiled = lowered.compile(OPTIONS if backend == "v6e" and name != "packs" else None)
        file = here / f"{backend}-{jax.__version__}-{name}.hlo"
        file.write_text(trimmed(compiled.as_text()))
        if backend == "cpu":  # what is requested is the same for all
            requested = here / f"requested-{jax.__version__}-{name}.txt"
            requested.write_text(lowered.as_text("hlo"))


if __name__ == "__main__":
    main(*sys.argv[1:])
