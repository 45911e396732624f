#!/bin/sh
# Boot a light host in three steps: network cable, cgroup, file systems. Then systemd runs as its PID 1.
# host.sh starts it with its environment.
set -eu
case $1 in
  cable) # in the host's new network namespace; PID 1 is the holder of the lab
    ip link add "$NIC" address "$MAC" type veth peer name "$NAME" netns 1
    nsenter --net=/proc/1/ns/net ip link set "$NAME" master br0 up
    exec unshare --mount --uts --ipc --pid --fork --kill-child --propagation private sh "$0" cgroup
    ;;
  cgroup) # PID 1 of the host from here on
    for group in $CGROUPS; do echo 0 > "$group/cgroup.procs"; done
    exec unshare --cgroup sh "$0" root
    ;;
esac

cd "$ROOT"
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o nosuid,nodev,noexec sysfs sys
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 sys/fs/cgroup
# All hosts share the kernel: a host may change its own settings (the network), not the global ones.
mount --bind proc/sys proc/sys
mount --bind proc/sys/net proc/sys/net
mount -o remount,bind,ro proc/sys
if [ -e proc/sysrq-trigger ]; then
  mount --bind proc/sysrq-trigger proc/sysrq-trigger
  mount -o remount,bind,ro proc/sysrq-trigger
fi

mount -t tmpfs -o mode=755,nosuid,size=4m tmpfs dev
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
  IFS=: read -r name major minor <<N
$node
N
  mknod -m 666 "dev/$name" c "$major" "$minor"
done
mkdir dev/pts dev/shm dev/net
mknod -m 666 dev/net/tun c 10 200
mount -t devpts -o newinstance,gid=5,mode=620,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr

for folder in $BINDS; do
  mkdir -p "./$folder"
  mount --bind "$folder" "./$folder"
  mount -o remount,bind,ro "./$folder"
  # The user of the host needs access to the folder, also below /root.
  parent=$(dirname "./$folder")
  while [ "$parent" != . ]; do
    chmod o+x "$parent"
    parent=$(dirname "$parent")
  done
done

pivot_root . .
umount -l .
# "container" tells systemd not to set the clock, load modules or change global settings; the capabilities enforce it.
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio,-mknod,-syslog /sbin/init
