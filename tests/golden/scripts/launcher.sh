#!/bin/bash
# trainyard run tiny-37487d: start it on every host with the place of the host, 0 to 1, within a few
# minutes, from a folder that holds the files named in the last line. Start it again to resume.
set -euo pipefail
export HEAD=10.0.0.1
not_loopback() { awk '$1 !~ /^127[.]/ && !found++ { print $1 }'; }
device() { sed -n '1s/.* dev \([^ ]*\).*/\1/p'; }
address=$(getent ahostsv4 "$HEAD" | not_loopback) nic=
case $HEAD in 127.*|localhost) nic=lo ;; esac
[ -n "$address$nic" ] || address=$(getent ahostsv4 "${PEER:-$HEAD}" | not_loopback)
if [ -n "$address" ]; then
    nic=$(ip -o -4 address show to "$address" | awk 'NR == 1 { print $2 }')
    [ -n "$nic" ] || nic=$(ip -o route get "$address" | device)
elif [ -z "$nic" ]; then
    nic=$(ip -o -4 route show default | device)
fi
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$nic}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$nic}"
exec python -m torch.distributed.run --nnodes=2 --node-rank="${1:-1}" --nproc-per-node=4 --master-addr="$HEAD" --master-port=29500 -m -- trainer train specs/lora.yml --strategy=deepspeed
