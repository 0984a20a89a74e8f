#!/bin/bash
# Start this on the first host of the host file: process 0 runs there, and all connect to it.
# Open MPI 4 needs no address; Open MPI 5 does. Without --bind-to none it binds each process to one core.
# MPICH and Intel MPI: mpiexec -f hosts -n 16 python train.py, with the same variable.
set -euo pipefail
JAX_COORDINATOR_ADDRESS="${FIRST_HOST:-$(hostname -f)}:29500"
export JAX_COORDINATOR_ADDRESS
mpirun --bind-to none --hostfile "${HOST_FILE:-hosts}" -n "${PROCESSES:-16}" -x JAX_COORDINATOR_ADDRESS python train.py
