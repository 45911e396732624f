"""Real hosts on one machine: each with its own systemd, sshd, address, disk and firewall. See docs/lab.md."""
