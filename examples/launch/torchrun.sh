#!/bin/bash
# Starts a script's ranks on this node. Run it on every node, with HEAD the name of one of them:
#   HEAD=node1 NODES=2 RANKS=8 examples/launch/torchrun.sh examples/finetune_trainer.py \
#       --deepspeed ds_configs/zero3_sp4.json
# PORT, JOB and RESTARTS may be set: a free port of HEAD, a name that is the same on all nodes, and how often the ranks
# are started again after one of them has ended.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else ranks that are started again find addresses of those that ended
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-8}" --rdzv-backend c10d --rdzv-id "${JOB:-ds_seqpar}" \
    --max-restarts "${RESTARTS:-0}" --rdzv-endpoint "${HEAD:?the name of one node}:${PORT:-29500}" "$@"
