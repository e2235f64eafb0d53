#!/usr/bin/env bash
# A run on a Slurm allocation: Ray on each of its nodes, the run on the first, nothing left behind.
#
#   sbatch slurm.sh recipe=gsm8k name=first output_dir=/shared/runs
#
# Before the time limit Slurm signals this script alone. The run takes a checkpoint, and the job goes back into the queue.
#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "${PENSTOCK:-$HOME/penstock}" # a directory that all nodes see
source .venv/bin/activate
ulimit -n "$(ulimit -Hn)" # each member of a run has two connections to the store
address_of_this_node() { getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\./ && !found++ {print $1}'; }
wait_for_head() { timeout 600 bash -c 'until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do sleep 2; done'; }
export -f address_of_this_node wait_for_head
RAY_ADDRESS=$(address_of_this_node):$((20000 + SLURM_JOB_ID % 10000))
RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID # short, since Ray's sockets are below it
RAY_AUTH_MODE=token
RAY_worker_killing_policy_by_group=1 # where memory runs low, Ray ends one process at a time, the newest first
export RAY_ADDRESS RAY_TMPDIR RAY_AUTH_MODE RAY_worker_killing_policy_by_group
(umask 077; ray get-auth-token --generate >/dev/null) # ~/.ray is shared, too

# Slurm would bind the one task of a node to a part of its cores, such as a socket.
srun --cpu-bind=none bash -c '
  mkdir -m 700 "$RAY_TMPDIR"
  trap "rm -rf $RAY_TMPDIR" EXIT
  if [ "$SLURM_PROCID" = 0 ]; then role="--head --port=${RAY_ADDRESS#*:}"; else wait_for_head; role=--address=$RAY_ADDRESS; fi
  ray start --block $role --node-ip-address="$(address_of_this_node)" --num-cpus="$SLURM_CPUS_ON_NODE"' &

wait_for_head
trap 'requeue=yes; kill -TERM "$!"' USR1
penstock run cluster.wait_s=600 faults.preemption_s=150 resume=auto "$@" & # the signal comes 180 s before the end
wait "$!" && status=0 || status=$?
if [ "${requeue:-}" ]; then
  wait "$!" && status=0 || status=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
