#!/bin/bash
#SBATCH --job-name=trainyard-tiny-00c95e
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=48:00:00
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@120
#SBATCH --requeue
# trainyard run tiny-00c95e: submit it from a shared folder that holds the files named in the last line.
# Submit it again to resume from the newest checkpoint.
set -euo pipefail
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PEER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)
address=$(address_of "$HEAD")
export HEAD="${address:-$HEAD}"
[ -z "$PEER" ] || address=$(address_of "$PEER")
export PEER="${PEER:+${address:-$PEER}}"
exec srun --kill-on-bad-exit=1 --cpu-bind=none bash -euo pipefail -c 'not_loopback() { awk '\''$1 !~ /^127[.]/ && !found++ { print $1 }'\''; }
device() { sed -n '\''1s/.* dev \([^ ]*\).*/\1/p'\''; }
address=$(getent ahostsv4 "$HEAD" | not_loopback) nic=
case $HEAD in 127.*|localhost) nic=lo ;; esac
[ -n "$address$nic" ] || address=$(getent ahostsv4 "${PEER:-$HEAD}" | not_loopback)
if [ -n "$address" ]; then
    nic=$(ip -o -4 address show to "$address" | awk '\''NR == 1 { print $2 }'\'')
    [ -n "$nic" ] || nic=$(ip -o route get "$address" | device)
elif [ -z "$nic" ]; then
    nic=$(ip -o -4 route show default | device)
fi
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$nic}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$nic}"
data=$PWD
if [ "$SLURM_NODEID" -gt 0 ]; then
    data=$PWD/runs/tiny-00c95e/nodes/$SLURM_NODEID
    mkdir -p "$data"
fi
exec python -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID --nproc-per-node=8 --master-addr="$HEAD" --master-port=29500 -m -- trainer train specs/lora.yml --data-dir="$data"'
