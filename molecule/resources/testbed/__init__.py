"""A lab: hosts with systemd, sshd, an address and a disk of their own on this machine (docs/lab.md)."""
