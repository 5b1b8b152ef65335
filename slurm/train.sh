#!/bin/bash
# Train on several nodes under SLURM; docs/many-gpus.md has the details.
#
#     sbatch slurm/train.sh config/train_gpt2.py --out_dir=/shared/out
#
# Options of sbatch win over those below: sbatch --nodes=4 --time=48:00:00 slurm/train.sh ...

#SBATCH --job-name=fusedgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# all CPUs and all memory of a node
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# append to the log after a requeue
#SBATCH --open-mode=append
# if a node fails, SLURM starts the job again
#SBATCH --requeue
# five minutes before the time is up, this script gets SIGTERM
#SBATCH --signal=B:TERM@300

set -u
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs on one node should not share a port

# use a new store for each start: PyTorch's shared store would not let a node that comes back join
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun kills processes that take longer than this to save after SIGTERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270

stopped=
step=
trap 'stopped=yes; [ -z "$step" ] || kill -TERM "$step"' TERM

# init_from=auto: the run in out_dir if there is one, or else as the config says. A flag of this script wins.
srun --kill-on-bad-exit=1 python -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --max_restarts=10 \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
    train.py --init_from=auto "$@" &
step=$!

[ -z "$stopped" ] || kill -TERM "$step" # the signal came before the line above
wait "$step"
status=$?
if [ -n "$stopped" ]; then
    wait "$step" && exit 0 # the signal ended the first wait; all processes save now, unless training has ended
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
