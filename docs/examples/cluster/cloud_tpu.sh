#!/bin/bash
# Cloud TPU: runs the same program on every worker of a slice; JAX finds the other workers.
# Usage: cloud_tpu.sh TPU_NAME ZONE
set -euo pipefail
gcloud compute tpus tpu-vm scp train.py "$1": --worker=all --zone="$2"
gcloud compute tpus tpu-vm ssh "$1" --worker=all --zone="$2" --command="python3 train.py"
