#!/bin/bash
#SBATCH --job-name=ds_seqpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=TERM@300
# A task is a rank. Five minutes before the time is up, slurm sends SIGTERM to all of them:
#   sbatch examples/launch/slurm.sh examples/finetune_trainer.py --deepspeed ds_configs/zero3_sp4.json \
#       --enable_jit_checkpoint True
# A job that is queued again after it was preempted goes on: its script is given --resume_from_checkpoint last.
set -euo pipefail
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then set -- "$@" --resume_from_checkpoint last; fi
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # the first of them
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python "$@"' rank "$@"
