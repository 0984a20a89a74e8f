#!/bin/bash
# No scheduler: sets torchrun's four variables by ssh, and starts one process on each of HOSTS.
set -euo pipefail
read -ra hosts <<< "${HOSTS:-host0 host1}"
pids=()
for rank in "${!hosts[@]}"; do
  # JAXCOLL_JOB: processes of another run at the same address are refused.
  ssh "${hosts[$rank]}" env MASTER_ADDR="${hosts[0]}" MASTER_PORT="${PORT:-29500}" JAXCOLL_JOB="$(hostname):$$" \
    WORLD_SIZE="${#hosts[@]}" RANK="$rank" python train.py &
  pids+=("$!")
done
for pid in "${pids[@]}"; do wait "$pid"; done
