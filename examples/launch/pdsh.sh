#!/bin/bash
# Starts a script on the nodes of ./hostfile, by DeepSpeed's launcher over pdsh, from the first node:
#   examples/launch/pdsh.sh examples/finetune_trainer.py --deepspeed ds_configs/zero3_sp4.json
# HOSTFILE and MASTER_PORT may be set. Nodes need the same folder and environment, and ssh without a password.
set -euo pipefail
HOSTFILE=${HOSTFILE:-$(dirname "$0")/hostfile}
MASTER_ADDR=$(awk '$1 ~ /^[^#]/ {print $1; exit}' "$HOSTFILE")
exec deepspeed --hostfile "$HOSTFILE" --launcher pdsh --master_addr "$MASTER_ADDR" \
    --master_port "${MASTER_PORT:-29500}" "$@"
