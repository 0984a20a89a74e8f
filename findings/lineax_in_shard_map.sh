#!/usr/bin/env bash
# lineax 0.1.1 with equinox 0.13.8 and JAX 0.10.2 (the same with JAX 0.12.0.1), on CPU.
# lineax.linear_solve with a matrix operator works under jax.jit. Inside jax.pmap and jax.shard_map,
# with check_vma=False as well as True, the same call raises ValueError "Vector and operator
# structures do not match" for a vector and an operator of the same shape and dtype: JAX puts the
# manual mesh's sharding into the type of the vector that came in, the type of an operator made from
# a constant has none, and lineax compares the two for equality.
# Fails if the solve succeeds there, or raises anything else.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  jax==0.10.2 jaxlib==0.10.2 lineax==0.1.1 equinox==0.13.8
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
matrix, rows = np.diag([1.0, 2.0, 4.0]).astype("f"), np.ones((2, 3), "f")


def solve(b):
    return lx.linear_solve(lx.MatrixLinearOperator(jnp.asarray(matrix)), b).value


expected = np.array([1.0, 0.5, 0.25], "f")
np.testing.assert_allclose(jax.jit(solve)(rows[0]), expected)
mapped = {"pmap": jax.pmap(solve)}
for check in (False, True):
    mapped[f"shard_map, check_vma={check}"] = jax.jit(
        jax.shard_map(
            lambda b: solve(b[0])[None],
            mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check,
        )
    )
for name, call in mapped.items():
    try:
        call(rows)
    except ValueError as error:
        assert "structures do not match" in str(error), error
        print(f"{name}: {str(error)[:48]}")
    else:
        raise SystemExit(f"{name}: it works now")
PY
