#!/usr/bin/env bash
# JAX 0.10.2 and 0.12.0.1 with jax_cpu_collectives_implementation=mpi, Open MPI 4.1.4, MPIwrapper 2.11.
# A program of two processes that sums an array prints the right result on both, and then MPI aborts
# the job: "MPI_Comm_free() was called after MPI_FINALIZE", status 1. JAX registers MPI_Finalize with
# atexit when it makes the CPU client, after its own clean-up, so it runs before the clean-up that
# frees the client's communicators.
# Fails if the job ends with 0, or does not print its sums.
# Needs mpirun of Open MPI, and MPIwrapper's libmpiwrapper.so in MPITRAMPOLINE_LIB (no registry has it).
set -euo pipefail
: "${MPITRAMPOLINE_LIB:?path of a libmpiwrapper.so for this mpirun}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
cat > "$folder/sums.py" <<'PY'
import os

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "mpi")
jax.distributed.initialize("127.0.0.1:29534", 2, int(os.environ["OMPI_COMM_WORLD_RANK"]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.ones(1, "f"))
print("sum", jax.jit(lambda x: x.sum())(rows), flush=True)
PY
export JAX_PLATFORMS=cpu OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
status=0
mpirun --oversubscribe -n 2 "$folder/venv/bin/python" "$folder/sums.py" > "$folder/log" 2>&1 || status=$?
[ "$(grep -o 'sum 2.0' "$folder/log" | wc -l)" = 2 ] || { cat "$folder/log"; exit 1; }
grep -q 'MPI_Comm_free() function was called after MPI_FINALIZE' "$folder/log" && [ "$status" != 0 ] ||
  { echo "the job ends well now (status $status)"; exit 1; }
echo "both printed their sums, and the job ended with $status"
