"""The Python environments of the hosts: their contents (`resolve`), the hosts that build them (`plan`), the files that are sent (`bundle`)."""
