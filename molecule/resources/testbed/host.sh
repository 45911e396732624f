#!/bin/sh
# Runs one light host for as long as it lives, in the lab's namespaces: disk, then boot after boot, as its systemd asks.
# LAB (folder of the lab), NAME, NIC, MAC, LOWER (shared root), CGROUPS, BINDS (folders to show read-only) are in the environment.
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
  # What is left of the cable after a crash.
  ip link del "$NAME" 2>/dev/null || :
  code=0
  unshare --net sh "$here/boot.sh" cable || code=$?
  # In a PID namespace reboot(2) ends the init with SIGHUP, and poweroff with SIGINT.
  [ "$code" = 129 ] || exit "$code"
done
