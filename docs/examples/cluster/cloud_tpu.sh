#!/bin/bash
# Cloud TPU: the same program on every worker of a slice; JAX finds the others by itself.
set -euo pipefail
gcloud compute tpus tpu-vm scp train.py "$1": --worker=all --zone="$2"
gcloud compute tpus tpu-vm ssh "$1" --worker=all --zone="$2" --command="python3 train.py"
