"""What sudo says if it refuses, and what to do."""

import re

SUDO_ERRORS = {  # of what Ansible or sudo says, as regular expressions
    r"sudo: (command )?not found|sudo: No such file": "sudo is not installed: install it as root (apt-get install sudo), or set ansible_user: root",
    "must have a tty|no tty present": "sudo wants a terminal: add `Defaults:USER !requiretty` for the login user with visudo",
    "Incorrect sudo password": "sudo refuses the password that -K or ansible_become_password gave",
    "Missing sudo password|password is required": "sudo needs a password: give it with -K, or allow the login user NOPASSWD with visudo",
    "not in the sudoers|is not allowed to|may not run": "sudo refuses the login user: add it to the group sudo as root (usermod -aG sudo USER)",
}


def sudo_error(said: str) -> str:
    """Return the cause and the remedy, separated by a colon; an empty string for an unknown cause."""
    return next((line for pattern, line in SUDO_ERRORS.items() if re.search(pattern, said)), "")
