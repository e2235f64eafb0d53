#!/usr/bin/env bash
# A run on a Slurm allocation: Ray on each of its nodes, the run on the first, all of it gone afterwards.
#
#   sbatch slurm.sh recipe=gsm8k name=first output_dir=/shared/runs
#
# A job that is requeued goes on from where it was: the run has a name, and resume=auto.
#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

cd "${PENSTOCK:-$HOME/penstock}" # a directory that all nodes see
source .venv/bin/activate
ulimit -n "$(ulimit -Hn)" # each member of a run has two connections to the store
export RAY_AUTH_MODE=token
(umask 077; ray get-auth-token --generate >/dev/null) # ~/.ray is shared, too

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # reads to the end: one that `head` leaves may be killed
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')
ray=$address:$((20000 + SLURM_JOB_ID % 10000))
exec srun ray symmetric-run --address "$ray" --min-nodes "$SLURM_NNODES" -- \
  env RAY_ADDRESS="$ray" penstock run resume=auto "$@"
