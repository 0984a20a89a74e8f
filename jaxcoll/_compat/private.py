"""Every private part of JAX that jaxcoll uses, each because JAX has no public name for it.

The coordinator's process, which must not load JAX, has its own in `service.py`.
"""

from __future__ import annotations

from typing import Any

from jax._src import clusters, config, core, distributed, traceback_util, xla_bridge
from jaxlib import _hlo, _jax, _profiler  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib.xla_client import CompileOptions as CompileOptions  # compiles another process's text
from jaxlib.xla_client import DeviceAssignment as DeviceAssignment
from jaxlib.xla_client import DeviceList as DeviceList

backends_are_initialized = xla_bridge.backends_are_initialized  # asking for backends makes them
boundary: Any = traceback_util.api_boundary  # shortens users' tracebacks, as in JAX's functions
cache_names_lines: Any = config.compilation_cache_include_metadata_in_key  # of this thread, too
cache_seconds: Any = config.persistent_cache_min_compile_time_secs  # as a context: of this thread
checks_types: Any = config._check_vma  # true in a trace whose types tell replicas apart
cluster_env: Any = clusters.ClusterEnv  # what JAX itself finds of a cluster
hide_frames: Any = traceback_util.register_exclusion
hlo: Any = _hlo  # reads serialized programs
is_idle: Any = core.trace_state_clean  # false in a thread that is tracing
jaxlib: Any = _jax  # Gloo, and clients and services of a key-value store
job: Any = distributed.global_state  # the client of the job that this process joined
make_cpu_client: Any = xla_bridge.make_cpu_client  # to make another one, over Gloo
profiler: Any = _profiler  # sessions in memory, where `jax.profiler` writes to a folder
trace_context: Any = config.trace_context  # all settings that a trace depends on
