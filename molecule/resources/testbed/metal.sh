#!/bin/sh
# Run one host under qemu in the namespaces of the lab until it is switched off. qemu handles reboots.
# Environment: LAB (folder of the lab), NAME, MAC, LOWER (root file system that its disk is copied from), ACCEL, CGROUPS,
# BINDS (folders of this machine, of which write_shared made the disks folder*.img).
set -eu
disk=$LAB/$NAME/disk.img
if [ ! -e "$disk" ]; then
  cp --sparse=always "$LOWER.img" "$disk.new"
  mkdir -p "$LAB/$NAME/root"
  mount -o loop "$disk.new" "$LAB/$NAME/root"
  cp -a --remove-destination "$LAB/files/." "$LAB/$NAME/files/." "$LAB/$NAME/root/"
  for folder in $BINDS; do
    mkdir -p "$LAB/$NAME/root$folder"
    # The user of the host needs access to the folder, also below /root.
    parent=$(dirname "$folder")
    while [ "$parent" != / ]; do
      chmod o+x "$LAB/$NAME/root$parent"
      parent=$(dirname "$parent")
    done
  done
  umount "$LAB/$NAME/root"
  mv "$disk.new" "$disk"
fi
ip link del "$NAME" 2>/dev/null || :
ip tuntap add "$NAME" mode tap
ip link set "$NAME" master br0 up
set -- # the disks with copies of BINDS
for image in "$LAB"/folder*.img; do
  [ ! -e "$image" ] || set -- "$@" -drive "file=$image,if=virtio,format=raw,readonly=on"
done
# no_timer_check: an emulated kernel with too little CPU time considers its timer broken and panics.
for group in $CGROUPS; do echo 0 > "$group/cgroup.procs"; done
exec qemu-system-x86_64 -accel "$ACCEL" -cpu max -m 1024 -smp 1 -nodefaults -display none -serial stdio \
  -kernel "$(ls "$LOWER"/boot/vmlinuz-*)" -initrd "$(ls "$LOWER"/boot/initrd.img-*)" \
  -append 'root=/dev/vda rw console=ttyS0 quiet no_timer_check panic=1' \
  -drive "file=$disk,if=virtio,format=raw,cache=unsafe" "$@" -device virtio-rng-pci \
  -netdev "tap,id=lan,ifname=$NAME,script=no,downscript=no" -device "virtio-net-pci,netdev=lan,mac=$MAC"
