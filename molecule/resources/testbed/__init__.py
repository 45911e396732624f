"""A lab: hosts on this machine, each with systemd, sshd, an address and a disk (CONTRIBUTING.md)."""
