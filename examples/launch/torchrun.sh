#!/bin/bash
# Starts a script's ranks on this node. Run it on every node, with HEAD the name of one of them:
#   HEAD=node1 NODES=2 RANKS=8 examples/launch/torchrun.sh examples/finetune_trainer.py \
#       --deepspeed ds_configs/trainer_zero3_sp4.json
# PORT and JOB may be set: a free port of HEAD, and a name that is the same on all nodes.
set -euo pipefail
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-8}" --rdzv-backend c10d --rdzv-id "${JOB:-ds_seqpar}" \
    --rdzv-endpoint "${HEAD:?the name of one node}:${PORT:-29500}" "$@"
