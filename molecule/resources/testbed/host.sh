#!/bin/sh
# Run one light host in the namespaces of the lab: mount its disk, and boot it again after every reboot.
# Environment: LAB (folder of the lab), NAME, NIC, MAC, LOWER (shared root), CGROUPS, BINDS (folders to mount read-only).
set -eu
here=$(dirname "$0")
disk=$LAB/$NAME/disk
export ROOT="$LAB/$NAME/root"
if ! mountpoint -q "$ROOT"; then
  mkdir -p "$disk" "$ROOT"
  mount -o loop,discard "$disk.img" "$disk"
  mkdir -p "$disk/upper" "$disk/work"
  mount -t overlay -o "lowerdir=$LOWER,upperdir=$disk/upper,workdir=$disk/work" overlay "$ROOT"
fi
if [ ! -s "$ROOT/etc/machine-id" ]; then
  cp -a --remove-destination "$LAB/files/." "$LAB/$NAME/files/." "$ROOT/"
fi
while :; do
  # The veth of a crashed boot.
  ip link del "$NAME" 2>/dev/null || :
  code=0
  unshare --net sh "$here/boot.sh" cable || code=$?
  # In a PID namespace reboot(2) ends init with SIGHUP, poweroff with SIGINT.
  [ "$code" = 129 ] || exit "$code"
done
