#!/usr/bin/env bash
# Trains a language model of 32 million parameters, 509 MB of model state, within 120 MiB of host memory, on the source
# of the Python standard library, and checks it against the same training in memory. Takes about 5 minutes on 2 cores
# after set-up. Further arguments go to `offload train` and win over those here; results go to runs/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

mkdir -p "$root/runs"
exec "$venv/bin/offload" train \
  --layers 10 --width 512 --heads 8 --context 128 --batch 4 --steps 160 --lr 1e-3 \
  --nvme-path "$root/runs" --host-memory 120MiB --verify 8 \
  --out "$root/runs/demo-$(date +%Y-%m-%d_%H-%M-%S)" "$@"
