#!/bin/bash
# Two processes on this host under each MPI launcher that is there, and each of two jobs at one address:
#
#   PYTHON=python tests/launchers/launchers.sh
#
# Debian: openmpi-bin, mpich. Exits with 1 if a job that should end with 0 does not, or sums of two jobs mix.
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=127.0.0.1:29517
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/job.py" << 'PY'
import sys, time
value, late = float(sys.argv[1]), float(sys.argv[2])
import jaxcoll as jc
from jaxcoll._job.launchers import read_member
import os
rank = read_member(os.environ).process_id
time.sleep(late * rank)
try:
    jc.initialize(initialization_timeout_seconds=30)
except (ValueError, OSError, jc.errors.DeadlineExceededError) as error:
    sys.exit(f"refused {type(error).__name__}")
import jax
import numpy as np
total = jc.data_parallel(lambda x: jc.psum(x.sum()))(np.full(1, value))
print(f"sum {total:.0f} of {value:.0f}", flush=True)
time.sleep(2 * rank)
PY
status=0
for launcher in "mpirun.openmpi --bind-to none -n 2" "mpiexec.hydra -n 2"; do
  command -v "${launcher%% *}" > /dev/null || { echo "skipped: ${launcher%% *}"; continue; }
  $launcher "${PYTHON:-python}" "$here/job.py" 1 6 > "$here/a" 2>&1 &
  sleep 2
  $launcher "${PYTHON:-python}" "$here/job.py" 100 0 > "$here/b" 2>&1
  wait $! || status=1
  echo "$launcher: A $(grep -c 'sum 2 of 1$' "$here/a"), B $(grep -c refused "$here/b") refused"
  [ "$(grep -c 'sum 2 of 1$' "$here/a")" = 2 ] && ! grep -q 'sum' "$here/b" || { cat "$here/a" "$here/b"; status=1; }
done
exit $status
