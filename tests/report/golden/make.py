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
import numpy as np
from jax.experimental import topologies

sys.path.append(str(Path(__file__).parents[2] / "hlo"))
from hlo_programs import PROGRAMS

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


GOLDEN = "kinds loop branches mesh variadic overlapped layers packs".split()
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
    line, here = np.array(devices(where), dtype=object), Path(__file__).parent
    backend = where.partition(":")[0]
    for name in chosen or [x for x in GOLDEN if ONLY.get(x, backend) == backend]:
        program, arguments = PROGRAMS[name](line)
        lowered = program.lower(*arguments)
        compiled = lowered.compile(OPTIONS if backend == "v6e" and name != "packs" else None)
        file = here / f"{backend}-{jax.__version__}-{name}.hlo"
        file.write_text(trimmed(compiled.as_text()))
        if backend == "cpu":  # what is requested is the same for all
            requested = here / f"requested-{jax.__version__}-{name}.txt"
            requested.write_text(lowered.as_text("hlo"))


if __name__ == "__main__":
    main(*sys.argv[1:])
